"""A column of a matrix given to a collective: gloo takes its address and its length, and never its strides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Scenario, Verdict
from dtprobe.authoring import symptoms, tries

if TYPE_CHECKING:
    from dtprobe import Evidence

scenario = Scenario(
    name="noncontiguous-collective",
    failure_mode="noncontiguous-collective",
    title="A column of a matrix is reduced as if it were contiguous",
    claim="All-reduce, broadcast and reduce of a tensor that is not contiguous end without an error on gloo; elements of the view are "
    "wrong, and cells of the matrix outside the view are overwritten.",
    source="failure document, section 4.2 (its analogue on CPU); failure modes people meet",
    layer="c10d",
    certifies_not="Nothing about NCCL, which refuses tensors that are not contiguous. Nothing about dense permuted tensors (a transpose).",
    world_size=2,
    timeout_s=60,
    repeats=2,
    control=Arm("worker.py"),
    fault=Arm("worker.py", args=("--strided",)),
    mitigated=Arm("worker.py", args=("--strided", "--guarded")),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Calls that ended without an error and left wrong elements in the view, or wrote outside it."""
    rows = symptoms.attempts(evidence)
    wrong, outside, elements = (tries.number(rows, name) for name in ("wrong", "outside", "elements"))
    silent = rows["error"].eq("")
    # the root of a broadcast only sends, and what reduce leaves on ranks that are not its root is not said
    rows = rows[rows["what"].eq("all_reduce") | rows["rank"].eq(0).eq(rows["what"].eq("reduce"))]
    by_op = {
        f"wrong_{op}": symptoms.share(rows[rows["what"].eq(op)], (wrong.gt(0) | outside.gt(0))[rows.index])
        for op in ("all_reduce", "broadcast", "reduce")
    }
    fault = rows["arm"].eq("fault")
    return tries.judged(
        evidence,
        rows,
        (silent & (wrong.gt(0) | outside.gt(0)))[rows.index],
        shown="ended without an error and with wrong elements in the view or outside it",
        cured=(silent & wrong.eq(0) & outside.eq(0) & elements.gt(0))[rows.index],
        healed="were right and touched nothing else",
        metrics={
            **by_op,
            "overwrote_cells_outside": symptoms.share(rows, outside.gt(0)[rows.index]),
        },
        more=f"Up to {int(wrong[rows.index][fault].max() or 0)} of 8 elements were wrong, and up to {int(outside[rows.index][fault].max() or 0)} "
        "cells outside the view overwritten."
        if fault.any()
        else "",
    )
