"""One rank brings more elements than the others: gloo aborts a process, or fills a part of the tensor and says nothing."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from dtprobe import Arm, Scenario, Verdict, VerdictKind
from dtprobe.authoring import mismatch, nccl

if TYPE_CHECKING:
    from dtprobe import Evidence

scenario = Scenario(
    name="collective-shape-mismatch",
    failure_mode="collective-shape-mismatch",
    title="One rank all-reduces 6 elements where the others all-reduce 4",
    claim="An all-reduce of 4 elements on one rank and 6 on another ends a process by SIGABRT, which no Python code can catch; "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL reports the difference instead.",
    source="failure modes people meet; measured here",
    layer="code",
    certifies_not="Nothing about NCCL, which from 4 MB up ends with exit code 0 and wrong data.",
    variant="all-reduce",
    default=True,
    world_size=2,
    repeats=2,
    control=mismatch.CONTROL,
    fault=mismatch.FAULT,
    mitigated=mismatch.MITIGATED,
    expect={"torch>=2.9": "reproduced"},
)


def _broadcast(arm: Arm) -> Arm:
    return replace(arm, program="broadcast.py")


broadcast = scenario.with_variant(
    "broadcast",
    default=False,
    title="A rank expects 6 elements of a root that broadcasts 4",
    claim="A broadcast of 4 elements to a rank that expects 6 ends without an error: the first 4 are filled, the rest is what "
    "was there before. TORCH_DISTRIBUTED_DEBUG=DETAIL reports the difference.",
    control=_broadcast(mismatch.CONTROL),
    fault=_broadcast(mismatch.FAULT),
    mitigated=_broadcast(mismatch.MITIGATED),
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Steps in which the process was aborted, or that failed because the other rank's was; every run has an aborted one."""
    found = mismatch.judged(
        evidence,
        lambda rows: rows["died"] | rows["error"].fillna("").ne(""),
        "ended the process, or failed because the other rank's was ended",
        detail_catches=True,
    )
    fault = evidence.outcomes[evidence.outcomes["arm"].eq("fault")]
    aborted = fault["signal"].eq(signal.SIGABRT).fillna(False).groupby(fault["repeat"]).any()
    kind = found.kind
    if kind is VerdictKind.REPRODUCED and not aborted.all():
        kind = VerdictKind.PARTLY
    because = f"A rank ended by SIGABRT in {int(aborted.sum())} of {len(aborted)} runs. {found.because}"
    return replace(found, kind=kind, because=because)


@broadcast.judge
def judge_broadcast(evidence: Evidence) -> Verdict:
    """Steps of the rank that expects more: no error, and elements that nobody sent."""
    return mismatch.judged(
        evidence,
        lambda rows: rows["silent"],
        "of the receiver ended without an error and with a part of the tensor not filled",
        detail_catches=True,
        recorder_sees=True,
        only=(mismatch.CULPRIT,),
    )


gpu = nccl.variant(
    scenario,
    "shape",
    claim="On NCCL an all-reduce of 2 KB meets one of half of it: the rank with less goes on, the other waits and is ended by the watchdog; the "
    "numbers in the flight recorder blame the rank that did right.",
)


@gpu.judge
def judge_gpu(evidence: Evidence) -> Verdict:
    """How NCCL's waiting ranks end, and who is named before."""
    return nccl.judge(evidence, nccl.Claim(recorder_names=False))


MANY = str(16 << 20)
"""Elements of float32, 64 MiB: far above the 4 MiB from which NCCL's simple protocol ends without waiting for the rest."""

large = nccl.variant(
    scenario,
    "shape",
    "gpu-large",
    claim="On NCCL an all-reduce of 64 MiB meets one of half of it: both end without an error, and the half that one rank did not bring is wrong.",
    control=nccl.arm("--calls", "shape", "--elements", MANY, timeout_s=30),
    fault=nccl.arm("--calls", "shape", "--elements", MANY, "--differs"),
    mitigated=nccl.arm("--calls", "shape", "--elements", MANY, "--differs", "--checked", timeout_s=30),
)


@large.judge
def judge_large(evidence: Evidence) -> Verdict:
    """How NCCL's waiting ranks end, and who is named before."""
    return nccl.judge(evidence, nccl.Claim(silent=True, recorder_names=False))
