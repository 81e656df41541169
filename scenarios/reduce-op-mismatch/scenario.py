"""One rank multiplies where the others add: both go on with the same wrong numbers, and no tool sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Scenario, Verdict
from dtprobe.authoring import mismatch

if TYPE_CHECKING:
    from dtprobe import Evidence

scenario = Scenario(
    name="reduce-op-mismatch",
    failure_mode="reduce-op-mismatch",
    title="One rank reduces by another operation",
    claim="An all-reduce by SUM on one rank and PRODUCT on another ends without an error and with wrong elements on both; neither "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL nor the flight recorder shows a difference.",
    source="failure modes people meet; measured here",
    layer="code",
    certifies_not="Nothing about NCCL, whose kernels are picked by the operation.",
    world_size=2,
    repeats=2,
    control=mismatch.CONTROL,
    fault=mismatch.FAULT,
    mitigated=mismatch.MITIGATED,
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Steps that ended without an error and with wrong elements, unseen by torch's own check."""
    return mismatch.judged(
        evidence,
        lambda rows: rows["silent"],
        "ended without an error and with wrong elements",
        detail_catches=False,
        recorder_sees=False,
    )
