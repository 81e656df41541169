"""One rank broadcasts where the others all-reduce: everyone waits, and nobody is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Scenario, Verdict
from dtprobe.authoring import mismatch, nccl

if TYPE_CHECKING:
    from dtprobe import Evidence

scenario = Scenario(
    name="collective-type-mismatch",
    failure_mode="collective-type-mismatch",
    title="One rank broadcasts where the others all-reduce",
    claim="Ranks that meet with different collectives wait until their timeout and fail with an error that names neither the "
    "rank nor the collective; TORCH_DISTRIBUTED_DEBUG=DETAIL reports the difference at once.",
    source="failure modes people meet; measured here",
    layer="code",
    certifies_not="Nothing about NCCL, where collectives of the same size can pair and give wrong data instead.",
    world_size=2,
    repeats=2,
    control=mismatch.CONTROL,
    fault=mismatch.FAULT,
    mitigated=mismatch.MITIGATED,
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Steps that failed at their timeout, with an error that names no rank."""
    return mismatch.judged(
        evidence,
        lambda rows: rows["late"] & ~rows["named_culprit"],
        "failed at their timeout with an error that names nobody",
        detail_catches=True,
        recorder_sees=True,
    )


gpu = nccl.variant(
    scenario,
    "type",
    claim="On NCCL an all-gather meets an all-reduce: one of the two completes with garbage, its rank goes on to the next step, and both are "
    "ended by the watchdog; the numbers in the flight recorder blame the rank that did right.",
)


@gpu.judge
def judge_gpu(evidence: Evidence) -> Verdict:
    """How NCCL's waiting ranks end, and who is named before."""
    return nccl.judge(evidence, nccl.Claim(aborted=(0, nccl.CULPRIT), recorder_names=False))
