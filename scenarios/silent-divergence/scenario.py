"""One bit of one rank's gradient flips after an all-reduce: the replicas part for good, and nothing that is logged shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Metric, Mitigation, Scenario, Verdict, VerdictKind, proc

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

WORLD_SIZE = 3
CULPRIT = 1
"""The rank whose gradient is changed. The judge finds it from the hashes and compares."""

FAULT = f"collective:corrupt,rank={CULPRIT},op=all_reduce,nth=13,element=1234,bit=20,where=output"
"""The 13th all-reduce, that of step 12; a bit of the mantissa: the gradient of one weight changes by at most an eighth."""

ARMS = ("control", "fault", "mitigated")
CUDA = ("--device", "cuda")

scenario = Scenario(
    name="silent-divergence",
    failure_mode="silent-corruption",
    title="A bit flips in one rank's gradient and its replica is another model from there on",
    claim="One bit that flips after an all-reduce on one rank raises nothing, and neither the loss nor the norm of the weights shows "
    "it; the ranks train different models until the end.",
    source="failure modes people meet: silent data corruption",
    layer="c10d",
    certifies_not="What a defective core or GPU does: there one instruction on certain data is wrong, again and again. And that a "
    "bit flips in the exponent, which the loss may show.",
    world_size=WORLD_SIZE,
    timeout_s=60,
    repeats=2,
    needs=("linux", "torch"),
    probes=(proc(hz=10),),
    control=Arm("worker.py"),
    fault=Arm("worker.py", faults=(FAULT,)),
    mitigated=Arm("worker.py", args=("--guard",), faults=(FAULT,)),
    expect={"torch>=2.9": "reproduced"},
)


gpu = scenario.with_variant(
    "gpu",
    title=f"{scenario.title} (weights on GPUs)",
    certifies_not="Three ranks on two GPUs, over gloo, since NCCL takes one rank a GPU and two cannot outvote each other. Nothing about what a "
    "defective GPU does: there one instruction on certain data is wrong, again and again.",
    needs=("linux", "torch", "cuda:2"),
    tags=("gpu",),
    measures_cost=False,
    control=Arm("worker.py", args=CUDA),
    fault=Arm("worker.py", args=CUDA, faults=(FAULT,)),
    mitigated=Arm("worker.py", args=(*CUDA, "--guard"), faults=(FAULT,)),
    expect={"torch>=2.9": "partly"},  # at one step of 30 the loss or the norm is on the other side of a rounding
)


@gpu.judge
@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Steps after which hashes differ, against those whose logged loss or norm do; who is named, and how many steps later."""
    from dtprobe.stats import separated_counts

    steps = compared(evidence.events("step"))
    errors = evidence.events("error").reindex(columns=["arm", "repeat", "rank", "step", "named"])
    if not {"control", "fault"} <= set(steps["arm"]):
        return Verdict(kind=VerdictKind.INCONCLUSIVE, control_healthy=False, because="no step was recorded by all ranks")
    parted = {arm: (int(own["parted"].sum()), len(own)) for arm, own in steps.groupby("arm")}
    logged = {arm: (int((own["parted"] & own["logged"]).sum()), int(own["parted"].sum())) for arm, own in steps.groupby("arm")}
    fault = steps[(steps["arm"] == "fault") & steps["parted"]]
    alone = bool(len(fault)) and set(fault["odd"]) == {(CULPRIT,)}
    told = int((errors["arm"] == "fault").sum()) + _failed(evidence, "fault")
    lasting = bool(len(fault)) and (fault.groupby("repeat")["step"].max() == steps["step"].max()).all()
    shown = separated_counts(*parted["fault"], *parted["control"]) and alone and lasting and not told
    kind = VerdictKind.NOT_REPRODUCED
    if shown:
        kind = VerdictKind.REPRODUCED if logged["fault"][0] == 0 else VerdictKind.PARTLY
    end = evidence.events("end", "fault").reindex(columns=["rank", "elements", "apart", "by"])
    at_end = end[end["rank"] == CULPRIT]
    because = (
        f"After {parted['fault'][0]} of {parted['fault'][1]} steps the ranks' weights differed, {parted['control'][0]} of "
        f"{parted['control'][1]} in control; the logged loss or norm differed in {logged['fault'][0]} of those, and {told} errors were raised."
    )
    if shown and len(at_end):
        because += (
            f" Only rank {CULPRIT} was apart, at the end in {int(at_end['apart'].max())} of {int(at_end['elements'].max())} weights"
            f" by up to {float(at_end['by'].max()):.1e}."
        )
    late = latency(steps, errors)
    named = int((errors["arm"].eq("mitigated") & errors["named"].eq(str(CULPRIT))).sum())
    if late:
        because += f" Checked after each step: {named} errors named rank {CULPRIT}, {max(late)} steps later at most."
    return Verdict(
        kind=kind,
        mitigation=_mitigation(evidence, errors, late),
        control_healthy=parted["control"][0] == 0
        and _failed(evidence, "control") == 0
        and not errors["arm"].eq("control").any(),
        metrics=_metrics(evidence, parted, logged, errors, late),
        because=because,
    )


def compared(said: pd.DataFrame) -> pd.DataFrame:
    """One row a step that all ranks recorded: whether hashes differ (`parted`), what is logged does (`logged`), and who is `odd`."""
    import pandas as pd

    rows = []
    wanted = ["arm", "repeat", "rank", "step", "loss", "norm", "digest"]
    for (arm, repeat, step), own in said.reindex(columns=wanted).groupby(["arm", "repeat", "step"]):
        if arm not in ARMS or len(own) < WORLD_SIZE:
            continue
        most = own["digest"].value_counts()
        common = most.index[0] if len(most) == 1 or most.iloc[0] > most.iloc[1] else None
        rows.append(
            {
                "arm": arm,
                "repeat": int(repeat),
                "step": int(step),
                "parted": len(most) > 1,
                "logged": own["loss"].nunique() > 1 or own["norm"].nunique() > 1,
                "odd": tuple(sorted(int(rank) for rank in own.loc[own["digest"] != common, "rank"])),
            }
        )
    return pd.DataFrame(rows, columns=["arm", "repeat", "step", "parted", "logged", "odd"])


def latency(steps: pd.DataFrame, errors: pd.DataFrame) -> list[int]:
    """Steps from the first one after which the mitigated arm's ranks differed to each error, which may never come."""
    own = steps[(steps["arm"] == "mitigated") & steps["parted"].astype(bool)]
    first = own.groupby("repeat")["step"].min()
    found = errors[(errors["arm"] == "mitigated") & errors["repeat"].isin(first.index)]
    return [int(step - first[repeat]) for repeat, step in zip(found["repeat"], found["step"], strict=True)]


def _mitigation(evidence: Evidence, errors: pd.DataFrame, late: list[int]) -> Mitigation:
    """Held where every rank raised in the very step in which they parted, and named the culprit alone."""
    if not evidence.ran("mitigated"):
        return Mitigation.NONE
    own = errors[errors["arm"] == "mitigated"]
    ranks = int((evidence.outcomes["arm"] == "mitigated").sum())
    held = len(own) == len(late) == ranks and own["named"].eq(str(CULPRIT)).all() and max(late) == 0 and min(late) == 0
    return Mitigation.HELD if held else Mitigation.FAILED


def _failed(evidence: Evidence, arm: str) -> int:
    codes = evidence.outcomes.loc[evidence.outcomes["arm"] == arm, "exit_code"]
    return int((~codes.eq(0).fillna(False)).sum())


def _metrics(
    evidence: Evidence,
    parted: dict[str, tuple[int, int]],
    logged: dict[str, tuple[int, int]],
    errors: pd.DataFrame,
    late: list[int],
) -> dict[str, Metric]:
    from dtprobe.stats import measured, wilson

    def shares(counts: dict[str, tuple[int, int]]) -> Metric:
        return Metric(unit="share", **{arm: wilson(k, n) for arm, (k, n) in counts.items() if n})

    ranks = {arm: int((evidence.outcomes["arm"] == arm).sum()) for arm in ARMS}
    naming = errors[errors["named"].eq(str(CULPRIT))].groupby("arm").size()
    end = evidence.events("end").reindex(columns=["arm", "rank", "by"])
    end = end[end["arm"].isin(ARMS)]  # the runs that measure what recorders cost are no arm
    apart = {arm: own.loc[own["rank"] == CULPRIT, "by"].astype(float).tolist() for arm, own in end.groupby("arm")}
    return {
        "steps_apart": shares(parted),
        "steps_apart_that_the_log_shows": shares(logged),
        "ranks_naming_the_culprit": shares({arm: (int(naming.get(arm, 0)), count) for arm, count in ranks.items()}),
        "largest_difference_at_the_end": Metric(unit="", **{arm: measured(own) for arm, own in apart.items() if own}),
        "steps_to_an_error": Metric(unit="steps", mitigated=measured([float(one) for one in late]) if late else None),
    }
