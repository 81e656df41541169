"""Two ranks take themselves for the root of a broadcast: both wait, and no tool sees the difference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Scenario, Verdict
from dtprobe.authoring import mismatch, nccl

if TYPE_CHECKING:
    from dtprobe import Evidence

scenario = Scenario(
    name="broadcast-root-mismatch",
    failure_mode="broadcast-root-mismatch",
    title="Ranks name different roots of a broadcast",
    claim="Ranks that name different roots wait until their timeout, both as senders; a third rank gets its data, goes on, and fails in the "
    "next collective. Neither TORCH_DISTRIBUTED_DEBUG=DETAIL nor the flight recorder shows a difference.",
    source="failure modes people meet; measured here",
    layer="code",
    certifies_not="Nothing about NCCL, where the ranks pass and the next collective hangs.",
    world_size=3,
    repeats=2,
    control=mismatch.CONTROL,
    fault=mismatch.FAULT,
    mitigated=mismatch.MITIGATED,
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Both roots fail at their timeout, and neither check nor recorder sees why."""
    return mismatch.judged(
        evidence,
        lambda rows: rows["late"] & ~rows["named_culprit"],
        "of the two roots failed at their timeout with an error that names nobody",
        detail_catches=False,
        recorder_sees=False,
        only=(0, mismatch.CULPRIT),
    )


gpu = nccl.variant(
    scenario,
    "root",
    claim="On NCCL both broadcasts complete, the collective after them hangs on every rank, and the flight recorder shows no difference.",
)


@gpu.judge
def judge_gpu(evidence: Evidence) -> Verdict:
    """How NCCL's waiting ranks end, and who is named before."""
    return nccl.judge(evidence, nccl.Claim(aborted=(0, nccl.CULPRIT), recorder_names=False))
