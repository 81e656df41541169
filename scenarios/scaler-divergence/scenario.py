"""A gradient overflows on one rank: it skips the step and halves its scale, the others go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Scenario, Verdict
from dtprobe.authoring import symptoms, tries

if TYPE_CHECKING:
    from dtprobe import Evidence

LONE = 4
"""The step in which rank 1 alone overflows."""

scenario = Scenario(
    name="scaler-divergence",
    failure_mode="scaler-divergence",
    title="A gradient overflows on one rank, which skips a step that the others take",
    claim="When a gradient that is not reduced overflows on one rank, that rank's GradScaler skips the step and halves its scale, and the "
    "others' do not. From there on scales and shared weights differ between the ranks, and nothing is raised.",
    source="failure modes people meet; measured here",
    layer="code",
    certifies_not="Nothing about gradients that are all averaged: then all ranks see the overflow, as step 2 of every arm shows.",
    world_size=2,
    timeout_s=60,
    repeats=2,
    control=Arm("worker.py"),
    fault=Arm("worker.py", args=("--overflow",)),
    mitigated=Arm("worker.py", args=("--overflow", "--consistent")),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Steps from that overflow on after which the ranks' scales or shared weights differ."""
    looks = symptoms.attempts(evidence, "look")
    scales, apart, scale = (tries.number(looks, name) for name in ("scales", "apart", "scale"))
    differ = scales.gt(1) & apart.gt(0)
    after = tries.number(looks, "step").ge(LONE)
    raised = symptoms.attempts(evidence, "step")
    errors = int(raised["error"].fillna("").ne("")[raised["arm"].eq("fault")].sum())
    last = looks[looks["arm"].eq("fault")].groupby("rank")["scale"].last() if len(looks) else []
    said = ", ".join(f"rank {rank} {value:g}" for rank, value in last.items()) if len(last) else ""
    return tries.judged(
        evidence,
        looks[after],
        differ[after],
        shown=f"from step {LONE} on found scales and shared weights of the ranks different",
        # the overflow is still there: the scale was halved twice
        cured=(scales.eq(1) & apart.eq(0) & scale.eq(8.0))[after],
        healed="found the ranks with one scale, halved on both, and equal weights",
        metrics={
            "weights_apart": symptoms.measure(looks[after], "apart", unit=""),
            "differed_before": symptoms.share(looks[~after], (scales.gt(1) | apart.gt(0))[~after]),
        },
        more=f"{errors} errors were raised in the fault arm; scales at its end: {said}." if said else "",
    )
