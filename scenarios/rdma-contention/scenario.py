"""RDMA beside TCP and UDP on one link, a peer or a link that goes away, and RoCEv2 frames on a shaped cable."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from dtprobe import Arm, Metric, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from dtprobe import Evidence

RATE_MBIT, MESSAGES = 16, 240
"""Of the lab's link, and how many of 16 KiB a transfer has. At 50 Mbit/s one emulated processor has 4 % left, and on a busy host none."""

LOST = 0.75
"""Below this share of what it has alone RDMA counts as displaced (the document's own loss, 22.1 to 18.3, is a share of 0.83)."""

KEPT, LEAST_TCP = 0.6, 0.12
"""A cure must leave RDMA, and must leave TCP, these shares of what each has alone: weights of 3:1 promise 0.75 and 0.25."""

SUM = (0.6, 1.15)
"""Goodputs of all flows together, as a share of the link's rate: outside of it the emulated processor decided, or the window slipped."""

SLACK_S, EARLY = 3.0, 0.9
"""How late a completion may fail after the time that retries and timeout give, and from which share of that time on it is not early."""

RETRY_EXCEEDED = 12
"""IBV_WC_RETRY_EXC_ERR, ibv_poll_cq(3)."""

EDGE_S = 0.5
"""Of the window in which RDMA was sending so much is left out at each end, where TCP's share is counted."""

COUNTERS = ("out_of_seq_request", "rcvd_seq_err", "completer_retry_err", "duplicate_request")


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
    repeats=2,
    needs=("linux", "verbs"),
    tags=("alone",),  # it measures times
    control=_measured("fifo:rdma", "fifo:tcp"),
    fault=_measured("fifo:rdma+tcp", "fifo:rdma+tcp+udp"),
    mitigated=_measured("ets:rdma+tcp"),
    expect={"torch>=2.9": "reproduced"},
)

priority = scenario.with_variant(
    "strict-priority",
    default=False,
    title="Strict priority for RDMA starves TCP",
    claim="A traffic class of its own with strict priority protects RDMA from other traffic.",
    source="measured here; the usual advice on the contention of section 2.4 of the failure document",
    needs=("linux", "lab"),
    control=_measured("prio:rdma", "prio:tcp"),
    fault=_measured("prio:rdma+tcp"),
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
        **changes,
    )


peer_killed = _lost(
    "peer-killed",
    title="A killed RDMA peer is found after (retry_cnt + 1) timeouts, or never",
    claim="When its peer dies a sender's work completes with status 12 after (retry_cnt + 1) x timeout.",
    control=Arm("losing.py", ("none:3:14:2",)),
    fault=Arm("losing.py", ("kill:3:14:5", "kill:3:17:7", "kill:7:14:6")),
    mitigated=Arm("losing.py", ("kill:3:14:5", "kill:3:17:7")),
    expect={"torch>=2.9": "partly"},
)

link_down = _lost(
    "link-down",
    title="A link that is down for a second ends an RDMA connection whose retries are over sooner",
    claim="When the link goes down a sender's work completes with status 12 after (retry_cnt + 1) x timeout, also where the link comes back later.",
    control=Arm("losing.py", ("none:3:14:2",)),
    fault=Arm("losing.py", ("down:3:14:5", "down:3:17:7", "flap:3:14:5")),
    mitigated=Arm("losing.py", ("flap:3:18:6",)),
    expect={"torch>=2.9": "reproduced"},
)

FRAMES_MBIT, FRAMES_RATE = 40, 10000
GIVES_WAY = 0.85
"""Below this share of what it has alone TCP has given way to the frames (0.68 seen on a busy machine)."""

frames = scenario.with_variant(
    "frames",
    default=False,
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
    rows = goodput(evidence)
    valid = rows[rows["valid"]]
    if (nothing := _nothing(evidence, rows, valid)) is not None:
        return nothing
    alone, beside = (values(valid, arm, "rdma_mbit", without="udp") for arm in ("control", "fault"))
    if not alone or not beside:
        return _inconclusive(f"no valid transfer alone or none beside others. {discarded(rows)}")
    share = median(beside) / median(alone)
    kind = VerdictKind.REPRODUCED if share < LOST and apart(alone, beside) else VerdictKind.NOT_REPRODUCED
    cured, mitigation = _cure(evidence, valid, alone)
    loud = values(valid, "fault", "rdma_mbit", only="udp")
    place = where(evidence)
    because = f"Ran on the {place}. RDMA wrote {median(alone):.1f} Mbit/s alone and {median(beside):.1f} beside other flows (a share of {share:.2f})"
    because += f", {median(loud):.1f} with UDP too." if loud else "."
    tcp = values(valid, "control", "tcp_mbit"), values(valid, "fault", "tcp_mbit", without="udp")
    if all(tcp):
        because += f" TCP had {median(tcp[0]):.1f} alone, {median(tcp[1]):.1f} then."
    losses = values(valid, "fault", "udp_loss")
    because += f" UDP lost {median(losses):.1%}." if losses else ""
    because += f" The receiver saw {median(values(valid, 'fault', 'out_of_seq_request')):.0f} gaps (out_of_seq_request), alone {median(values(valid, 'control', 'out_of_seq_request')):.0f}."
    metrics = {
        "rdma_mbit": metric(valid, "rdma_mbit", without="udp", documented="22.1 alone, 18.3 Gbit/s with TCP"),
        "rdma_beside_udp_mbit": metric(valid, "rdma_mbit", only="udp", documented="14.9 Gbit/s with TCP and UDP"),
        "tcp_mbit": metric(valid, "tcp_mbit", without="udp", documented="loses 28 %"),
        "udp_loss": metric(valid, "udp_loss", unit="share", documented="6.3 %"),
        "queue_drops": metric(valid, "drops", unit="packets"),
        **{name: metric(valid, name, unit="packets") for name in COUNTERS},
    }
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=_well(rows, valid, "control"),
        metrics={name: one for name, one in metrics.items() if one.control or one.fault},
        because=f"{because}{cured}{discarded(rows)}",
    )


@priority.judge
def judge_priority(evidence: Evidence) -> Verdict:
    """RDMA gets the link back, and TCP gets nothing: judged by both classes."""
    rows = goodput(evidence)
    valid = rows[rows["valid"]]
    if (nothing := _nothing(evidence, rows, valid)) is not None:
        return nothing
    alone = {name: values(valid, "control", name) for name in ("rdma_mbit", "tcp_mbit")}
    rdma, tcp = (values(valid, "fault", name) for name in ("rdma_mbit", "tcp_mbit"))
    if not all(alone.values()) or not (rdma or tcp):
        return _inconclusive(f"no valid transfer of one class. {discarded(rows)}")
    # Of an arm without TCP in it (the healthy workload) nothing is starved.
    starved = bool(tcp) and median(tcp) < LEAST_TCP * median(alone["tcp_mbit"]) and apart(alone["tcp_mbit"], tcp)
    whole = bool(rdma) and median(rdma) > LOST * median(alone["rdma_mbit"])
    kind = VerdictKind.NOT_REPRODUCED
    if starved:
        kind = VerdictKind.PARTLY if whole else VerdictKind.REFUTED
    cured, mitigation = _cure(evidence, valid, alone["rdma_mbit"], alone["tcp_mbit"])
    because = f"Under strict priority RDMA wrote {_said(rdma)} of {_said(alone['rdma_mbit'])} Mbit/s, and TCP had {_said(tcp)} of {_said(alone['tcp_mbit'])}."
    metrics = {
        name: metric(valid, name, unit=unit)
        for name, unit in (("rdma_mbit", "Mbit/s"), ("tcp_mbit", "Mbit/s"), ("drops", "packets"))
    }
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=_well(rows, valid, "control"),
        metrics=metrics,
        because=f"{because}{cured}{discarded(rows)}",
    )


@peer_killed.judge
def judge_peer(evidence: Evidence) -> Verdict:
    """Status 12 in time where retries are counted; never at retry_cnt 7, which soft-RoCE takes for no limit."""
    tries = losses(evidence)
    if (nothing := symptoms.undecided(evidence, {"tries": tries})) is not None:
        return nothing
    fault = tries[tries["arm"].eq("fault") & tries["fault"].ne("none")]
    told, silent = fault[fault["in_time"]], fault[fault["status"].eq(0)]
    kind = VerdictKind.NOT_REPRODUCED
    if len(told):
        kind = VerdictKind.REPRODUCED if len(told) == len(fault) else VerdictKind.PARTLY
    because = f"{len(told)} of {len(fault)} senders got status {RETRY_EXCEEDED} in time: {_delays(told)}."
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
    tries = losses(evidence)
    if (nothing := symptoms.undecided(evidence, {"tries": tries})) is not None:
        return nothing
    fault = tries[tries["arm"].eq("fault") & tries["fault"].ne("none")]
    told = fault[fault["in_time"]]
    kind = VerdictKind.NOT_REPRODUCED
    if len(told):
        kind = VerdictKind.REPRODUCED if len(told) == len(fault) else VerdictKind.PARTLY
    because = f"{len(told)} of {len(fault)} senders got status {RETRY_EXCEEDED} in time: {_delays(told)}."
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
    if median(beside) < GIVES_WAY * median(alone) and apart(alone, beside):
        kind = VerdictKind.REPRODUCED
    arrived = [float(one) for one in rows.loc[rows["arm"].eq("fault"), "frames_per_s"].dropna()]
    because = (
        f"Ran RoCEv2 frames on a shaped cable, no RDMA. TCP had {median(alone):.1f} Mbit/s of {FRAMES_MBIT} alone and {median(beside):.1f} beside the frames"
        f" (median of {len(beside)}), of which {median(arrived):.0f} a second came through the queue of {FRAMES_RATE} sent."
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


def goodput(evidence: Evidence) -> pd.DataFrame:
    """One row a case: Mbit/s of RDMA and of TCP in RDMA's window, UDP's share lost, counters' growth; `valid` and, where not, `why`."""
    import pandas as pd

    extra = ("folder", "idle", "drops", "from_s", "to_s", "rate_mbit", "invalid")
    tries = symptoms.attempts(evidence)
    tries = tries.reindex(columns=[*symptoms.COLUMNS, *extra])
    written, flows, counted = (foldered(evidence.frame(name)) for name in ("rdma_bandwidth", "iperf", "rdma_counters"))
    found = []
    for one in tries.itertuples():
        own = [_of(frame, one) for frame in (written, flows, counted)]
        found.append(_case(one, *own))
    columns = ["rdma_mbit", "tcp_mbit", "udp_loss", *COUNTERS, "why"]
    rows = pd.concat([tries, pd.DataFrame(found, columns=columns, index=tries.index)], axis=1)
    return rows.assign(valid=rows["why"].eq("")).astype({name: "Float64" for name in columns[:-1]})


def foldered(frame: pd.DataFrame) -> pd.DataFrame:
    """With the name of the folder in which each row's artifact lies."""
    return frame.assign(folder=[PurePath(source).parent.name for source in frame["source"]])


def _of(frame: pd.DataFrame, one: object) -> pd.DataFrame:
    keys = ("arm", "repeat", "folder")
    return frame[[all(row) for row in zip(*(frame[key].eq(getattr(one, key)) for key in keys), strict=True)]]


def _case(one: object, written: pd.DataFrame, flows: pd.DataFrame, counted: pd.DataFrame) -> dict[str, object]:
    clients = written[written["kind"].eq("bandwidth") & written["source"].str.endswith("ib_write_bw.txt")]
    rdma = float(clients["average_gbits"].iloc[-1]) * 1e3 if len(clients) else None
    tcp, udp = (flows[flows["protocol"].eq(name)] for name in ("tcp", "udp"))
    start_s, end_s = one.from_s + EDGE_S, one.to_s - EDGE_S
    within = tcp[tcp["start_s"].ge(start_s) & tcp["end_s"].le(end_s)]
    lasted_s = float((within["end_s"] - within["start_s"]).sum())
    tcp_mbit = float(within["bytes"].sum()) * 8 / 1e6 / lasted_s if lasted_s else None
    packets = float(udp["packets"].sum())
    grown = counted.pivot_table(index="counter", columns="moment", values="value", aggfunc="sum")
    moved = {name: _growth(grown, name) for name in COUNTERS}
    udp_mbit = float(udp["bits_per_s"].mean()) / 1e6 if len(udp) else 0.0
    why = _doubt(one, rdma, tcp_mbit, udp_mbit)
    return {
        "rdma_mbit": rdma,
        "tcp_mbit": tcp_mbit,
        "udp_loss": float(udp["lost"].sum()) / packets if packets else None,
        **moved,
        "why": why,
    }


def _growth(grown: pd.DataFrame, name: str) -> float | None:
    if name not in grown.index or not {"before", "after"} <= set(grown.columns):
        return None
    return float(grown.loc[name, "after"] - grown.loc[name, "before"])


def _doubt(one: object, rdma: float | None, tcp: float | None, udp: float) -> str:
    """Why a case says nothing about the link, empty where it does."""
    if not one.ended or one.error:
        return f"{one.error}: {one.text}"[:160] if one.ended else "it did not end"
    if isinstance(one.invalid, str) and one.invalid:
        return one.invalid
    if "rdma" in one.what and not rdma:
        return "perftest gave no figure"
    total = (rdma or 0.0) + (tcp or 0.0) + udp
    if (
        one.rate_mbit == one.rate_mbit and not SUM[0] <= total / one.rate_mbit <= SUM[1]
    ):  # NaN on a device, whose rate is unknown
        return f"all flows together {total:.1f} of {one.rate_mbit:g} Mbit/s"
    return ""


def losses(evidence: Evidence) -> pd.DataFrame:
    """One row a try; `in_time`: its work completed with status 12 when retries and timeout say, or at most SLACK_S later."""
    extra = ("fault", "retries", "promised_s", "watched_s", "status", "after_s", "completed")
    tries = symptoms.attempts(evidence).reindex(columns=[*symptoms.COLUMNS, *extra])
    tries = tries.astype({name: "Float64" for name in extra[2:]}).astype({"retries": "Int64", "fault": "string[python]"})
    timely = tries["after_s"].ge(EARLY * tries["promised_s"]) & tries["after_s"].le(tries["promised_s"] + SLACK_S)
    return tries.assign(in_time=(tries["status"].eq(RETRY_EXCEEDED) & timely).fillna(False).astype(bool))


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
    if where(evidence) != "lab VM":
        return " Not cured here: traffic classes are the switch's and the NIC's, which are left alone.", Mitigation.NONE
    tcp = tcp or values(valid, "control", "tcp_mbit")
    got = values(valid, "mitigated", "rdma_mbit"), values(valid, "mitigated", "tcp_mbit")
    if not (all(got) and tcp):
        return " With the cure no valid transfer of both classes.", Mitigation.FAILED
    held = median(got[0]) >= KEPT * median(rdma) and median(got[1]) >= LEAST_TCP * median(tcp)
    words = f" With the cure RDMA had {median(got[0]):.1f} and TCP {median(got[1]):.1f}."
    return words, Mitigation.HELD if held else Mitigation.FAILED


def _nothing(evidence: Evidence, rows: pd.DataFrame, valid: pd.DataFrame) -> Verdict | None:
    if (nothing := symptoms.undecided(evidence)) is not None:
        return nothing
    for arm in ("control", "fault"):
        if not valid["arm"].eq(arm).any():
            return _inconclusive(f"{arm} left no valid transfer.{discarded(rows)}")
    return None


def _well(rows: pd.DataFrame, valid: pd.DataFrame, arm: str) -> bool:
    """Whether every case of the arm came to a valid figure, be it at the second try."""
    wanted = rows.loc[rows["arm"].eq(arm), ["repeat", "what"]].drop_duplicates()
    got = valid.loc[valid["arm"].eq(arm), ["repeat", "what"]].drop_duplicates()
    return bool(len(wanted)) and len(wanted) == len(got)


def discarded(rows: pd.DataFrame) -> str:
    """How many cases were left out, and why."""
    out = rows[~rows["valid"]]
    return f" Left out {len(out)} of {len(rows)} measurements: {'; '.join(sorted(set(out['why'])))[:300]}." if len(out) else ""


def where(evidence: Evidence) -> str:
    """What it ran on: the lab VM, or a device of the host by name."""
    told = evidence.events("where")
    return " and ".join(sorted(set(told["place"]))) if "place" in told else "lab VM"


def values(rows: pd.DataFrame, arm: str, column: str, *, without: str = "", only: str = "") -> list[float]:
    """Figures of an arm's cases, those without a kind of traffic or those with it."""
    own = rows[rows["arm"].eq(arm)]
    if without:
        own = own[~own["what"].str.contains(without, regex=False)]
    if only:
        own = own[own["what"].str.contains(only, regex=False)]
    return [float(one) for one in own[column].dropna()]


def metric(
    rows: pd.DataFrame, column: str, *, unit: str = "Mbit/s", documented: str = "", without: str = "", only: str = ""
) -> Metric:
    from dtprobe.scenario import ARMS
    from dtprobe.stats import measured

    found = {arm: values(rows, arm, column, without=without, only=only) for arm in ARMS}
    return Metric(unit=unit, documented=documented, **{arm: measured(some) for arm, some in found.items() if some})


def median(some: Sequence[float]) -> float:
    from statistics import median as of

    return of(some) if some else 0.0


def apart(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether no figure of one side lies among the other's."""
    return max(second) < min(first) or max(first) < min(second)


def _said(some: Sequence[float]) -> str:
    return f"{median(some):.1f}" if some else "none"


def _inconclusive(why: str) -> Verdict:
    return Verdict(kind=VerdictKind.INCONCLUSIVE, control_healthy=False, because=why)
