"""A launcher within a launcher: four torchruns under one srun are four jobs of world size 1, all of which succeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

SLURM_TASKS = 4
PAIR = 2


def _arms(program: tuple[str, ...], variable: str, tasks: int, faults: tuple[str, ...] = ()) -> dict[str, Arm]:
    """The three arms of tasks counted by `variable`; `program` is what starts them, with its arguments."""
    first, *rest = program
    args = (*rest, "--task-var", variable, "--tasks", str(tasks))
    return {
        "control": Arm(first, (*args, "--meet"), faults=faults),
        "fault": Arm(first, args, faults=faults),
        "mitigated": Arm(first, (*args, "--resolve"), faults=faults),
    }


scenario = Scenario(
    name="nested-launcher",
    failure_mode="nested-launcher",
    title="Four torchruns under one srun are four jobs",
    claim="Where Slurm, Kubernetes and elastic launchers nest, `_get_rank_from_env` reads a RANK that another one has overwritten, and ranks collide.",
    source="failure document, section 3.1",
    layer="scheduler",
    certifies_not="Nothing about more than one host, nor about schedulers that set RANK themselves.",
    variant="slurm",
    default=True,
    world_size=1,
    timeout_s=180,
    repeats=2,
    needs=("linux", "torch", "slurm", "root"),
    **_arms(("cluster.py", str(SLURM_TASKS), "worker.py"), "SLURM_PROCID", SLURM_TASKS),
    expect={"torch>=2.9": "partly"},
)

SILENT = "Each task of the outer launcher that starts torchrun for one node gets a job of its own: every rank is rank 0 of 1, sums are 1, nothing is raised."

mpi = scenario.with_variant(
    "mpi",
    default=False,
    title="Two torchruns under one mpirun are two jobs",
    claim=SILENT,
    source="measured here; the real failure behind section 3.1 of the failure document",
    certifies_not="Nothing about mpirun itself: only the variables that it sets are there.",
    world_size=PAIR,
    needs=("linux", "torch"),
    **_arms(("worker.py",), "OMPI_COMM_WORLD_RANK", PAIR, ("environment:pretend,of=mpi",)),
    expect={"torch>=2.9": "reproduced"},
)

kubernetes = mpi.with_variant(
    "kubernetes",
    title="Two torchruns in the pods of one Indexed Job are two jobs",
    certifies_not="Nothing about Kubernetes itself: only the index that it tells a pod is there.",
    **_arms(
        ("worker.py",),
        "JOB_COMPLETION_INDEX",
        PAIR,
        tuple(f"environment:set,rank={index},var=JOB_COMPLETION_INDEX,value={index}" for index in range(PAIR)),
    ),
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """The documented claim: RANK is overwritten indeed, but nothing collides; each task is a world of its own, and succeeds."""
    found = _judged(evidence, refusing=set(range(SLURM_TASKS)))
    kind = VerdictKind.PARTLY if found.kind is VerdictKind.REPRODUCED else found.kind
    seen = evidence.events("seen").reindex(columns=["arm", "task", "env_rank", "symbol"])
    fault = seen[seen["arm"].eq("fault")]
    because = found.because
    if kind is VerdictKind.PARTLY:
        because = (
            f"RANK was 0 in {int(fault['env_rank'].eq(0).sum())} of {len(fault)} tasks, but nothing collided. {because} `_get_rank_from_env` "
            f"{'exists' if fault['symbol'].any() else 'does not exist in this torch'}."
        )
    return Verdict(
        kind=kind, mitigation=found.mitigation, control_healthy=found.control_healthy, metrics=found.metrics, because=because
    )


@mpi.judge
def judge_mpi(evidence: Evidence) -> Verdict:
    """Sums of one that nobody complained of; both tasks know the outer world's size, so both can refuse."""
    return _judged(evidence, refusing=set(range(PAIR)))


@kubernetes.judge
def judge_kubernetes(evidence: Evidence) -> Verdict:
    """As under mpirun, but a pod knows its index alone: index 0 may well be rank 0 of 1, all others can refuse."""
    return _judged(evidence, refusing=set(range(1, PAIR)))


def _judged(evidence: Evidence, refusing: set[int]) -> Verdict:
    sums = _sums(evidence)
    if (nothing := symptoms.undecided(evidence, {"sums": sums})) is not None:
        return nothing
    wrong, clean = (symptoms.counts(sums, sums["silent"], arm) for arm in ("fault", "control"))
    kind = symptoms.apart(wrong, clean, whole=bool(wrong[0] == wrong[1] and symptoms.ended_well(evidence, "fault")))
    values = ", ".join(f"{value:g}" for value in sorted(sums.loc[sums["arm"].eq("fault"), "value"].dropna().unique()))
    because = (
        f"{wrong[0]} of {wrong[1]} tasks summed a world of their own ({values} of {sums['right'].max():g}) and ended with exit code 0; where the torchruns "
        f"met {clean[0]} of {clean[1]}."
    )
    cured = sums[sums["arm"].eq("mitigated")]
    if len(cured):
        because += (
            f" bootstrap.resolve refused in {int(cured['refused'].sum())} of {len(cured)} tasks, with both launchers' claims."
        )
    return Verdict(
        kind=kind,
        mitigation=_mitigation(evidence, cured, refusing),
        control_healthy=symptoms.unmarred(sums, "control")
        and symptoms.ended_well(evidence, "control")
        and not sums.loc[sums["arm"].eq("control"), "silent"].any(),
        metrics={
            "worlds_of_their_own": symptoms.share(sums, sums["silent"]),
            "sum_of_ones": symptoms.measure(sums, "value", unit="ranks"),
            "refused": symptoms.share(sums, sums["refused"]),
        },
        because=because + symptoms.chance(kind),
    )


def _sums(evidence: Evidence) -> pd.DataFrame:
    """One row a task: `silent` has a sum that is not that of all tasks, `refused` was told both claims and never began."""
    rows = symptoms.attempts(evidence).reindex(columns=[*symptoms.COLUMNS, "value", "right"])
    claims = rows["text"].str.contains("torchrun", regex=False).fillna(False) & rows["text"].str.contains(
        "disagree", regex=False
    ).fillna(False)
    return rows.assign(
        task=rows["what"].str.removeprefix("sum ").astype("Int64"),
        silent=(rows["error"].eq("") & rows["value"].ne(rows["right"])).fillna(False).astype(bool),
        refused=(rows["error"].eq("PlacementError") & claims).fillna(False).astype(bool),
    )


def _mitigation(evidence: Evidence, cured: pd.DataFrame, refusing: set[int]) -> Mitigation:
    """Held where every task that can know refused, so that the outer launcher sees the job fail."""
    if not evidence.ran("mitigated"):
        return Mitigation.NONE
    own = cured[cured["task"].isin(refusing)]
    return Mitigation.HELD if set(own["task"]) == refusing and own["refused"].all() else Mitigation.FAILED
