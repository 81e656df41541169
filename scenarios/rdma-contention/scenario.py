"""RDMA beside TCP and UDP on one link, a peer or a link that goes away, and RoCEv2 frames on a shaped cable."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms
from dtprobe.catalog import load_module

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from dtprobe import Evidence

figures = load_module(Path(__file__).with_name("figures.py"), "_dtprobe_rdma_contention_figures")

RATE_MBIT, MESSAGES = 16, 300
"""Of the lab's link, and how many of 16 KiB a transfer has: 2.5 s alone, in which TCP's intervals lie. At 50 Mbit/s one emulated processor has 4 % left, and on a busy host none."""

LOST = 0.75
"""Below this share of what it has alone RDMA counts as displaced (the document's own loss, 22.1 to 18.3, is a share of 0.83)."""

KEPT, LEAST_TCP, FEW_GAPS = 0.5, 0.12, 0.1
"""A cure must leave RDMA, and must leave TCP, these shares of what each has alone (weights of 3:1 promise 0.75 and 0.25), and RDMA at most
this share of the gaps that the fault arm saw."""

ODD_GAPS = 3
"""So many may come from a busy host, whose emulator sleeps."""


def _measured(*cases: str) -> Arm:
    return Arm("measure.py", (str(RATE_MBIT), str(MESSAGES), *cases))


scenario = Scenario(
    name="rdma-contention",
    failure_mode="rdma-contention",
    title="TCP and UDP on the same link displace RDMA",
    claim="RDMA has 22.1 Gbit/s alone, 18.3 beside TCP and 14.9 beside TCP and UDP, while TCP loses 28 % and UDP 6.3 %; `out_of_buffer` counts it.",
    source="failure document, section 2.4",
    layer="network",
    certifies_not="In the lab VM: soft-RoCE on an emulated processor over a link shaped to 16 Mbit/s. Verbs, loss recovery and counters are real; absolute "
    "figures, PFC, ECN and congestion control of a NIC are not there. On a host's device: one that loads itself; no switch, no second host, no TCP.",
    variant="lab",
    default=True,
    world_size=1,
    timeout_s=420,  # the first run builds the lab's image
    repeats=1,  # a start of the machine costs more than another measurement in it
    measures_cost=False,
    needs=("linux", "verbs"),
    control=_measured("fifo:rdma", "fifo:tcp", "fifo:rdma", "fifo:tcp"),
    fault=_measured("fifo:rdma+tcp", "fifo:rdma+tcp+udp", "fifo:rdma+tcp"),
    mitigated=_measured("ets:rdma+tcp", "ets:rdma+tcp"),
    expect={"torch>=2.9": "reproduced"},
)

priority = scenario.with_variant(
    "strict-priority",
    default=False,
    title="Strict priority for RDMA starves TCP",
    claim="A traffic class of its own with strict priority protects RDMA from other traffic.",
    source="measured here; the usual advice on the contention of section 2.4 of the failure document",
    needs=("linux", "lab"),
    control=_measured("prio:rdma", "prio:tcp", "prio:rdma", "prio:tcp"),
    fault=_measured("prio:rdma+tcp", "prio:rdma+tcp"),
    expect={"torch>=2.9": "partly"},
)

LOSS_NOT = (
    "Soft-RoCE's transport only: on NICs retry_cnt 7 is finite, the timeout is rounded in the device's own way, and adaptive retransmission may "
    "change both."
)


def _lost(variant: str, **changes: object) -> Scenario:
    return scenario.with_variant(
        variant,
        default=False,
        certifies_not=LOSS_NOT,
        source="measured here; InfiniBand Architecture Specification 1.4, volume 1, section 9.7.6 (transport timer)",
        needs=("linux", "lab"),
        looks_like=("rank-lost",),  # what happens here is no contention: nobody answers
        **changes,
    )


peer_killed = _lost(
    "peer-killed",
    title="A killed RDMA peer is found after (retry_cnt + 1) timeouts, or never",
    claim="When its peer dies a sender's work completes with status 12 after (retry_cnt + 1) x timeout.",
    control=Arm("losing.py", ("none:3:14:2",) * 4),
    fault=Arm("losing.py", ("kill:3:14:5", "kill:3:17:7", "kill:7:14:6") * 2),
    mitigated=Arm("losing.py", ("kill:3:14:5", "kill:3:17:7") * 2),
    expect={"torch>=2.9": "partly"},
)

link_down = _lost(
    "link-down",
    title="A link that is down for a second ends an RDMA connection whose retries are over sooner",
    claim="When the link goes down a sender's work completes with status 12 after (retry_cnt + 1) x timeout, also where the link comes back later.",
    control=Arm("losing.py", ("none:3:14:2",) * 4),
    fault=Arm("losing.py", ("down:3:14:5", "down:3:17:7", "flap:3:14:5") * 2),
    mitigated=Arm("losing.py", ("flap:3:18:6",) * 2),
    expect={"torch>=2.9": "reproduced"},
)

FRAMES_MBIT, FRAMES_RATE = 40, 10000
GIVES_WAY = 0.85
"""Below this share of what it has alone TCP has given way to the frames (0.68 seen on a busy machine)."""

frames = scenario.with_variant(
    "frames",
    default=False,
    measures_cost=True,
    title="RoCEv2 frames fill a shaped cable's queue, and TCP on it gives way",
    claim="RDMA traffic displaces TCP on a shared link: RoCEv2 has no window that gives way to a full queue.",
    certifies_not="RDMA: the frames are RoCEv2's, but no queue pair sends them, and nothing answers a loss.",
    world_size=2,
    timeout_s=90,
    repeats=3,
    needs=("linux", "root", "netns", "veth", "tc", "package:pyroute2", "package:scapy"),
    control=Arm("beside_frames.py", faults=(f"network:bandwidth,rank=1,mbit={FRAMES_MBIT}",)),
    fault=Arm(
        "beside_frames.py",
        faults=(f"network:bandwidth,rank=1,mbit={FRAMES_MBIT}", f"rdma-frames:write,rank=1,rate={FRAMES_RATE}"),
    ),
    mitigated=None,
    no_cure_because="A traffic class at the switch's port is the cure, which the variant `lab` shows on real verbs; the cable's queue here has one class.",
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """What RDMA has alone and beside TCP, and what the cure leaves to both."""
    rows = figures.goodput(evidence)
    valid = rows[rows["valid"]]
    if (nothing := _nothing(evidence, rows, valid)) is not None:
        return nothing
    alone, beside = (figures.values(valid, arm, "rdma_mbit", without="udp") for arm in ("control", "fault"))
    if not alone or not beside:
        return _inconclusive(f"no valid transfer alone or none beside others. {figures.discarded(rows)}")
    share = figures.median(beside) / figures.median(alone)
    kind = VerdictKind.REPRODUCED if share < LOST and figures.apart(alone, beside) else VerdictKind.NOT_REPRODUCED
    cured, mitigation = _cure(evidence, valid, alone)
    loud = figures.values(valid, "fault", "rdma_mbit", only="udp")
    place = figures.where(evidence)
    because = f"Ran on the {place}. RDMA wrote {figures.median(alone):.1f} Mbit/s alone and {figures.median(beside):.1f} beside other flows (a share of {share:.2f})"
    because += f", {figures.median(loud):.1f} with UDP too." if loud else "."
    tcp = figures.values(valid, "control", "tcp_mbit"), figures.values(valid, "fault", "tcp_mbit", without="udp")
    if all(tcp):
        because += f" TCP had {figures.median(tcp[0]):.1f} alone, {figures.median(tcp[1]):.1f} then."
    losses = figures.values(valid, "fault", "udp_loss")
    because += f" UDP lost {figures.median(losses):.1%}." if losses else ""
    because += f" The receiver saw {figures.median(figures.values(valid, 'fault', 'out_of_seq_request')):.0f} gaps (out_of_seq_request), alone {figures.median(figures.values(valid, 'control', 'out_of_seq_request')):.0f}."
    metrics = {
        "rdma_mbit": figures.metric(valid, "rdma_mbit", without="udp", documented="22.1 alone, 18.3 Gbit/s with TCP"),
        "rdma_beside_udp_mbit": figures.metric(valid, "rdma_mbit", only="udp", documented="14.9 Gbit/s with TCP and UDP"),
        "tcp_mbit": figures.metric(valid, "tcp_mbit", without="udp", documented="loses 28 %"),
        "udp_loss": figures.metric(valid, "udp_loss", unit="share", documented="6.3 %"),
        "queue_drops": figures.metric(valid, "drops", unit="packets"),
        **{name: figures.metric(valid, name, unit="packets") for name in figures.COUNTERS},
    }
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=_well(rows, valid, "control"),
        metrics={name: one for name, one in metrics.items() if one.control or one.fault},
        because=f"{because}{cured}{figures.discarded(rows)}",
    )


@priority.judge
def judge_priority(evidence: Evidence) -> Verdict:
    """RDMA gets the link back, and TCP gets nothing: judged by both classes."""
    rows = figures.goodput(evidence)
    valid = rows[rows["valid"]]
    if (nothing := _nothing(evidence, rows, valid)) is not None:
        return nothing
    alone = {name: figures.values(valid, "control", name) for name in ("rdma_mbit", "tcp_mbit")}
    rdma, tcp = (figures.values(valid, "fault", name) for name in ("rdma_mbit", "tcp_mbit"))
    if not all(alone.values()) or not (rdma or tcp):
        return _inconclusive(f"no valid transfer of one class. {figures.discarded(rows)}")
    # Of an arm without TCP in it (the healthy workload) nothing is starved.
    starved = (
        bool(tcp)
        and figures.median(tcp) < LEAST_TCP * figures.median(alone["tcp_mbit"])
        and figures.apart(alone["tcp_mbit"], tcp)
    )
    whole = bool(rdma) and figures.median(rdma) > LOST * figures.median(alone["rdma_mbit"])
    kind = VerdictKind.NOT_REPRODUCED
    if starved:
        kind = VerdictKind.PARTLY if whole else VerdictKind.REFUTED
    cured, mitigation = _cure(evidence, valid, alone["rdma_mbit"], alone["tcp_mbit"])
    because = f"Under strict priority RDMA wrote {_said(rdma)} of {_said(alone['rdma_mbit'])} Mbit/s, and TCP had {_said(tcp)} of {_said(alone['tcp_mbit'])}."
    metrics = {
        name: figures.metric(valid, name, unit=unit)
        for name, unit in (("rdma_mbit", "Mbit/s"), ("tcp_mbit", "Mbit/s"), ("drops", "packets"))
    }
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=_well(rows, valid, "control"),
        metrics=metrics,
        because=f"{because}{cured}{figures.discarded(rows)}",
    )


@peer_killed.judge
def judge_peer(evidence: Evidence) -> Verdict:
    """Status 12 in time where retries are counted; never at retry_cnt 7, which soft-RoCE takes for no limit."""
    tries = figures.losses(evidence)
    if (nothing := symptoms.undecided(evidence, {"tries": tries})) is not None:
        return nothing
    fault = tries[tries["arm"].eq("fault") & tries["fault"].ne("none")]
    told, silent = fault[fault["in_time"]], fault[fault["status"].eq(0)]
    kind = VerdictKind.NOT_REPRODUCED
    if len(told):
        kind = VerdictKind.REPRODUCED if len(told) == len(fault) else VerdictKind.PARTLY
    because = f"{len(told)} of {len(fault)} senders got status {figures.RETRY_EXCEEDED} in time: {_delays(told)}."
    if len(silent):
        counts = ", ".join(str(one) for one in sorted(silent["retries"].unique()))
        because += f" {len(silent)} with retry_cnt {counts} got nothing within {silent['watched_s'].min():g} s, where {silent['promised_s'].max():.2f} s were due."
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        cured = tries[tries["arm"].eq("mitigated")]
        mitigation = Mitigation.HELD if len(cured) and cured["in_time"].all() else Mitigation.FAILED
        because += f" With counted retries only, {int(cured['in_time'].sum())} of {len(cured)}."
    return _lossy(evidence, tries, kind, mitigation, because)


@link_down.judge
def judge_link(evidence: Evidence) -> Verdict:
    """Status 12 in time for as long as the link is down; a timeout longer than the interruption survives it."""
    tries = figures.losses(evidence)
    if (nothing := symptoms.undecided(evidence, {"tries": tries})) is not None:
        return nothing
    fault = tries[tries["arm"].eq("fault") & tries["fault"].ne("none")]
    told = fault[fault["in_time"]]
    kind = VerdictKind.NOT_REPRODUCED
    if len(told):
        kind = VerdictKind.REPRODUCED if len(told) == len(fault) else VerdictKind.PARTLY
    because = f"{len(told)} of {len(fault)} senders got status {figures.RETRY_EXCEEDED} in time: {_delays(told)}."
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        cured = tries[tries["arm"].eq("mitigated")]
        survived = cured["ended"] & cured["status"].eq(0).fillna(False) & cured["completed"].gt(0).fillna(False)
        mitigation = Mitigation.HELD if len(cured) and survived.all() else Mitigation.FAILED
        because += (
            f" With a timeout longer than the second that the link was down {int(survived.sum())} of {len(cured)} went on."
        )
    return _lossy(evidence, tries, kind, mitigation, because)


@frames.judge
def judge_frames(evidence: Evidence) -> Verdict:
    """What TCP gets on the cable with and without the frames, and how many frames its queue let through."""
    rows = symptoms.attempts(evidence, "transfer").reindex(columns=[*symptoms.COLUMNS, "mbit", "frames_per_s"])
    rows = rows[rows["rank"].eq(1)]
    if (nothing := symptoms.undecided(evidence, {"transfers": rows.dropna(subset=["mbit"])})) is not None:
        return nothing
    alone, beside = ([float(one) for one in rows.loc[rows["arm"].eq(arm), "mbit"].dropna()] for arm in ("control", "fault"))
    kind = VerdictKind.NOT_REPRODUCED
    if figures.median(beside) < GIVES_WAY * figures.median(alone) and figures.apart(alone, beside):
        kind = VerdictKind.REPRODUCED
    arrived = [float(one) for one in rows.loc[rows["arm"].eq("fault"), "frames_per_s"].dropna()]
    because = (
        f"Ran RoCEv2 frames on a shaped cable, no RDMA. TCP had {figures.median(alone):.1f} Mbit/s of {FRAMES_MBIT} alone and {figures.median(beside):.1f} beside the frames"
        f" (median of {len(beside)}), of which {figures.median(arrived):.0f} a second came through the queue of {FRAMES_RATE} sent."
    )
    return Verdict(
        kind=kind,
        control_healthy=symptoms.ended_well(evidence, "control") and symptoms.unmarred(rows, "control"),
        metrics={
            "tcp_mbit": symptoms.measure(rows, "mbit", unit="Mbit/s", documented="RDMA displaces TCP by 28 %"),
            "frames_arrived": symptoms.measure(rows, "frames_per_s", unit="frames/s"),
        },
        because=because,
    )


def _lossy(evidence: Evidence, tries: pd.DataFrame, kind: VerdictKind, mitigation: Mitigation, because: str) -> Verdict:
    healthy = tries[tries["arm"].eq("control")]
    well = symptoms.ended_well(evidence, "control") and symptoms.unmarred(tries, "control")
    if tries.loc[tries["arm"].eq("fault"), "error"].ne("").any():
        return _inconclusive(f"a try failed by itself: {tries.loc[tries['error'].ne(''), 'text'].iloc[0]}")
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=bool(well and healthy["status"].eq(0).all() and healthy["completed"].gt(0).all()),
        metrics={
            "told_in_time": symptoms.share(tries, tries["in_time"]),
            "until_status_12_s": symptoms.measure(tries, "after_s"),
            "writes_after_the_fault": symptoms.measure(tries, "completed", unit="writes"),
        },
        because=f"Ran in the lab VM. {because}",
    )


def _delays(told: pd.DataFrame) -> str:
    parts = [
        f"{', '.join(f'{one:.2f}' for one in sorted(some['after_s']))} s of {promised:.2f}"
        for promised, some in told.groupby("promised_s")
    ]
    return "; ".join(parts) or "none"


def _cure(evidence: Evidence, valid: pd.DataFrame, rdma: Sequence[float], tcp: Sequence[float] = ()) -> tuple[str, Mitigation]:
    """What the mitigated arm left to both classes, in words, and whether that is enough of what each has alone."""
    if not evidence.ran("mitigated"):
        return "", Mitigation.NONE
    if figures.where(evidence) != "lab VM":
        return " Not cured here: traffic classes are the switch's and the NIC's, which are left alone.", Mitigation.NONE
    tcp = tcp or figures.values(valid, "control", "tcp_mbit")
    got = figures.values(valid, "mitigated", "rdma_mbit"), figures.values(valid, "mitigated", "tcp_mbit")
    if not (all(got) and tcp):
        return " With the cure there was not a valid transfer of each class.", Mitigation.FAILED
    gaps, before = (figures.median(figures.values(valid, arm, "out_of_seq_request")) for arm in ("mitigated", "fault"))
    held = figures.median(got[0]) >= KEPT * figures.median(rdma) and figures.median(got[1]) >= LEAST_TCP * figures.median(tcp)
    held = held and gaps <= max(FEW_GAPS * before, ODD_GAPS)
    words = f" With the cure RDMA had {figures.median(got[0]):.1f}, with {gaps:.0f} gaps, and TCP {figures.median(got[1]):.1f}."
    return words, Mitigation.HELD if held else Mitigation.FAILED


def _nothing(evidence: Evidence, rows: pd.DataFrame, valid: pd.DataFrame) -> Verdict | None:
    if (nothing := symptoms.undecided(evidence)) is not None:
        return nothing
    for arm in ("control", "fault", "mitigated"):
        cannot = arm == "mitigated" and figures.where(evidence) != "lab VM"
        if evidence.ran(arm) and not cannot and not valid["arm"].eq(arm).any():
            return _inconclusive(f"{arm} left no valid transfer.{figures.discarded(rows)}")
    return None


def _well(rows: pd.DataFrame, valid: pd.DataFrame, arm: str) -> bool:
    """Whether every case of the arm came to a valid figure, be it at the second try."""
    wanted = rows.loc[rows["arm"].eq(arm), ["repeat", "what"]].drop_duplicates()
    got = valid.loc[valid["arm"].eq(arm), ["repeat", "what"]].drop_duplicates()
    return bool(len(wanted)) and len(wanted) == len(got)


def _said(some: Sequence[float]) -> str:
    return f"{figures.median(some):.1f}" if some else "none"


def _inconclusive(why: str) -> Verdict:
    return Verdict(kind=VerdictKind.INCONCLUSIVE, control_healthy=False, because=why)
