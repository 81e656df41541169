"""One rank brings int32 where the others bring float32: both go on with garbage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Scenario, Verdict
from dtprobe.authoring import mismatch

if TYPE_CHECKING:
    from dtprobe import Evidence

scenario = Scenario(
    name="collective-dtype-mismatch",
    failure_mode="collective-dtype-mismatch",
    title="One rank brings int32 where the others bring float32",
    claim="An all-reduce of float32 on one rank and int32 on another, of the same size, ends without an error and with garbage on both; "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL reports the difference.",
    source="failure modes people meet; measured here",
    layer="code",
    certifies_not="Nothing about NCCL, nor about dtypes of different size, which differ in bytes as a shape does.",
    world_size=2,
    repeats=2,
    control=mismatch.CONTROL,
    fault=mismatch.FAULT,
    mitigated=mismatch.MITIGATED,
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Steps that ended without an error and with wrong elements."""
    return mismatch.judged(
        evidence,
        lambda rows: rows["silent"],
        "ended without an error and with wrong elements",
        detail_catches=True,
        recorder_sees=True,
    )
