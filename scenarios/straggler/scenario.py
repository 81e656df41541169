"""One rank has a fifth of a core: every rank is as slow as it is, and nothing raises."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dtprobe import Arm, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms
from dtprobe.catalog import load_module

if TYPE_CHECKING:
    from dtprobe import Evidence

late = load_module(Path(__file__).resolve().with_name("late.py"), "_dtprobe_scenario_late")

SLOW = 1
SLOWER = 1.5
BUSY = 2.5
"""Where equal work takes control's ranks so many times its processor time, no rank has a fifth of a core to lose."""

scenario = Scenario(
    name="straggler",
    failure_mode="straggler",
    title="One rank has a fifth of a core, and all are as slow as it is",
    claim="One rank with a fifth of the processor makes every step of every rank slower, without an error; by the time that a step takes all "
    "ranks look alike, and only the time of each rank's own work tells which one it is.",
    source="failure modes people meet",
    layer="process",
    certifies_not="Nothing about slow GPUs, links or storage. A machine so busy that no rank gets a fifth of a core shows nothing.",
    world_size=2,
    tags=("alone",),  # it measures times
    timeout_s=90,
    repeats=2,
    needs=("linux", "torch", "cgroup-cpu"),
    control=Arm("worker.py"),
    fault=Arm("worker.py", faults=(f"resource:cpu,rank={SLOW},cores=0.2",)),
    no_cure_because="the rank's share of the processor is the host's to give; the framework can only say who is slow",
    expect={"torch>=2.9": "reproduced"},
)

gpu = scenario.with_variant(
    "gpu",
    title=f"{scenario.title} (NCCL, two GPUs)",
    certifies_not="Small kernels, which the host must launch fast enough: a rank whose kernels take long hides a slow host.",
    needs=("linux", "torch", "cgroup-cpu", "cuda:2"),
    tags=("gpu",),
    measures_cost=False,
    repeats=1,
    control=Arm("worker.py", args=("--device", "cuda")),
    fault=Arm("worker.py", args=("--device", "cuda"), faults=(f"resource:cpu,rank={SLOW},cores=0.2",)),
)


@scenario.judge
@gpu.judge
def judge(evidence: Evidence) -> Verdict:
    """The time of whole steps by rank, of each rank's own work, and who is slow by that."""
    steps = symptoms.attempts(evidence, "step")
    if verdict := symptoms.undecided(evidence, {"step": steps}):
        return verdict
    steps = late.timed(steps)
    named = late.stragglers(steps)
    runs = sorted({int(repeat) for repeat in steps.loc[steps["arm"] == "fault", "repeat"]})
    right = sum(named.get(("fault", repeat)) == SLOW for repeat in runs)
    false = sum(arm == "control" for arm, _ in named)
    medians = steps.groupby(["arm", "rank"])["took_s"].median()
    slowed = {rank: float(medians["fault", rank] / medians["control", rank]) for rank in (0, 1)} if _both(medians) else {}
    control = steps[steps["arm"] == "control"]
    crowded = float((control["work_s"] / control["cpu_s"]).median())
    quiet = not steps.loc[steps["arm"] == "fault", "error"].fillna("").ne("").any()
    slow = bool(slowed) and min(slowed.values()) >= SLOWER
    kind = VerdictKind.NOT_REPRODUCED
    if right and quiet:
        kind = VerdictKind.REPRODUCED if slow and right == len(runs) else VerdictKind.PARTLY
    alike = f"{medians['fault', 0] * 1e3:.0f} and {medians['fault', 1] * 1e3:.0f} ms" if slowed else "unknown times"
    own = steps[steps["arm"] == "fault"].groupby("rank")["work_s"].median() * 1e3
    return Verdict(
        kind=kind,
        control_healthy=symptoms.ended_well(evidence, "control")
        and symptoms.unmarred(steps, "control")
        and not false
        and crowded < BUSY,
        metrics={
            "step_s": symptoms.measure(steps, "took_s"),
            "slow_rank_work_s": symptoms.measure(steps[steps["rank"] == SLOW], "work_s"),
            "other_rank_work_s": symptoms.measure(steps[steps["rank"] != SLOW], "work_s"),
        },
        because=f"Steps took ranks 0 and 1 {alike} in the median, {min(slowed.values(), default=0):.1f} times control's or more, and nothing was"
        f" raised. Their own work took {own.get(0, 0):.0f} and {own.get(1, 0):.0f} ms: by it rank {SLOW} was named in {right} of"
        f" {len(runs)} runs, and a rank in {false} runs of control, whose work took {crowded:.1f} times its processor time.",
    )


def _both(medians: object) -> bool:
    index = getattr(medians, "index", ())
    return all((arm, rank) in index for arm in ("control", "fault") for rank in (0, 1))
