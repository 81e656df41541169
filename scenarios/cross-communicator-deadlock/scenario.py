"""Two groups entered in opposite orders, each waited for: both ranks wait, and neither is missing from the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict
from dtprobe.authoring import nccl, symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

TIMEOUT_S = 3.0
SWAPS = ("--swap-rank", "1", "--timeout-s", str(TIMEOUT_S))

scenario = Scenario(
    name="cross-communicator-deadlock",
    failure_mode="cross-communicator-deadlock",
    title="Two groups entered in opposite orders wait for each other",
    claim="Ranks that enter two groups in opposite orders, and wait for each collective before the next, wait until the timeout and "
    "fail with errors that name no rank. TORCH_DISTRIBUTED_DEBUG=DETAIL is no sooner, and makes each rank blame the other. Where both "
    "are issued before any wait there is no deadlock.",
    source="failure modes people meet; measured here",
    layer="code",
    certifies_not="Nothing about NCCL, where kernels of both communicators also compete for the device.",
    world_size=2,
    repeats=2,
    control=Arm("worker.py", ("--ways", "none,detail,async,checked", "--timeout-s", "30", "--check-timeout-s", "30")),
    fault=Arm("worker.py", (*SWAPS, "--ways", "none,detail,async")),
    mitigated=Arm("worker.py", (*SWAPS, "--ways", "checked")),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Tries that failed at the group's timeout, plain, under DETAIL, and with both collectives issued before any wait."""
    tries = _tries(evidence)
    of = {way: tries[tries["way"].eq(way)] for way in ("none", "detail", "async", "checked")}
    if (nothing := symptoms.undecided(evidence, {name: of[name] for name in ("none", "detail", "async")})) is not None:
        return nothing
    hung, clean = (symptoms.counts(of["none"], of["none"]["hung"], arm) for arm in ("fault", "control"))
    detail = symptoms.counts(of["detail"], of["detail"]["hung"], "fault")
    at_once = symptoms.counts(of["async"], of["async"]["hung"], "fault")
    kind = symptoms.apart(hung, clean, whole=bool(hung[0] == hung[1] and detail[0] == detail[1] and at_once[0] == 0))
    because = (
        f"{hung[0]} of {hung[1]} tries failed at the {TIMEOUT_S:g} s timeout with an error that names nobody, {clean[0]} of {clean[1]} in "
        f"control; under DETAIL {detail[0]} of {detail[1]}, and {at_once[0]} of {at_once[1]} where both were issued before any wait."
    )
    cured = of["checked"][of["checked"]["arm"].eq("mitigated")]
    if len(cured):
        told = int(cured["told"].sum())
        because += f" Checked: {told} of {len(cured)} errors named a rank and the group in which it was, after {cured['took_s'].max():.1f} s."
    return Verdict(
        kind=kind,
        mitigation=_mitigation(evidence, cured),
        control_healthy=symptoms.unmarred(symptoms.attempts(evidence), "control") and symptoms.ended_well(evidence, "control"),
        metrics={
            "deadlocked": symptoms.share(of["none"], of["none"]["hung"]),
            "deadlocked_under_detail": symptoms.share(of["detail"], of["detail"]["hung"]),
            "deadlocked_without_wait_between": symptoms.share(of["async"], of["async"]["hung"]),
            "told_by_checked": symptoms.share(of["checked"], of["checked"]["told"]),
            "time_to_error_s": symptoms.measure(tries[tries["way"].isin(("none", "checked"))], "took_s"),
        },
        because=because + symptoms.chance(kind),
    )


def _tries(evidence: Evidence) -> pd.DataFrame:
    """All tries; `hung` failed late and named nobody, `told` named a rank and said in which other group it was seen."""
    rows = symptoms.attempts(evidence, "enter").reindex(columns=[*symptoms.COLUMNS, "way", "named"])
    failed = rows["error"].fillna("").ne("")
    named = rows["named"].fillna("").ne("")
    elsewhere = rows["text"].str.contains("was last seen at collective .* of group '(?:data|tensor)'", regex=True).fillna(False)
    return rows.assign(hung=failed & rows["took_s"].ge(0.9 * TIMEOUT_S) & ~named, told=failed & named & elsewhere)


def _mitigation(evidence: Evidence, cured: pd.DataFrame) -> Mitigation:
    """Held where each rank got an error that says who was missing and where it was, before the plain timeout."""
    if not evidence.ran("mitigated"):
        return Mitigation.NONE
    held = len(cured) and cured["told"].all() and (cured["took_s"] < 0.9 * TIMEOUT_S).all()
    return Mitigation.HELD if held else Mitigation.FAILED


gpu = nccl.variant(
    scenario,
    "order",
    claim="On NCCL two groups that are entered in opposite orders, with a synchronisation between, hang on both ranks until the watchdog ends "
    "them; the flight recorder shows each rank behind in one of the groups, so that it names neither.",
)


@gpu.judge
def judge_gpu(evidence: Evidence) -> Verdict:
    """How NCCL's waiting ranks end, and who is named before."""
    return nccl.judge(evidence, nccl.Claim(aborted=(0, nccl.CULPRIT), recorder_names=False))
