"""The back end cannot be made on one rank: torchrun ends the job, and nothing falls back to gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    from dtprobe import Evidence

FAILS = 1
FAULTY = ("--backend", "faulty")

scenario = Scenario(
    name="nccl-init-failure",
    failure_mode="nccl-init-failure",
    title="The back end cannot be made on one rank",
    claim="When NCCL fails at initialisation ('invalid device pointer'), torchrun degrades to Gloo and the job goes on.",
    source="failure document, section 3.3",
    layer="c10d",
    certifies_not="Nothing about NCCL itself: on CPU a back end that raises NCCL's error stands for it. What torch and torchrun make of a "
    "back end's error is theirs, whatever the back end.",
    world_size=2,
    launch="torchrun",
    timeout_s=90,
    repeats=2,
    control=Arm("worker.py"),
    fault=Arm("worker.py", args=FAULTY),
    mitigated=Arm("worker.py", args=(*FAULTY, "--cured")),
    expect={"torch>=2.9": "refuted"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Which ranks got a group, of which back end, and how the others ended."""
    import pandas as pd

    tries = symptoms.attempts(evidence, "init")
    if verdict := symptoms.undecided(evidence, {"init": tries}):
        return verdict
    made = evidence.events("made").reindex(columns=["arm", "repeat", "rank", "backend", "sum"])
    ranks = evidence.outcomes[evidence.outcomes["arm"].isin(("control", "fault", "mitigated"))].merge(
        made, on=["arm", "repeat", "rank"], how="left"
    )
    went_on = ranks["backend"].notna() | ranks["exit_code"].eq(0).fillna(False).astype(bool)
    runs = int(ranks.loc[ranks["arm"] == "fault", "repeat"].nunique())
    raised, _ = symptoms.counts(tries, tries["rank"].eq(FAILS) & tries["error"].eq("DistBackendError"), "fault")
    degraded, total = symptoms.counts(ranks, went_on, "fault")
    others = tries[tries["rank"] != FAILS]
    silent, other_tries = symptoms.counts(others, ~others["ended"], "fault")
    kind = VerdictKind.NOT_REPRODUCED
    if raised and degraded:
        kind = VerdictKind.REPRODUCED if degraded == total else VerdictKind.PARTLY
    elif raised == runs:
        kind = VerdictKind.REFUTED
    fine, controls = symptoms.counts(ranks, ranks["backend"].isin(("gloo", "nccl")) & ranks["sum"].eq(3.0), "control")
    cured = tries[tries["arm"] == "mitigated"].merge(evidence.outcomes[["arm", "repeat", "rank", "exit_code"]])
    reason = f"rank {FAILS}: .*NCCL error"
    told = cured["error"].eq("StartFailed") & cured["text"].str.contains(reason, regex=True)
    told = told.fillna(False).astype(bool)
    # stuck in the back end, from which no exception leads: it said why on stderr and ended by itself, before torchrun ended it
    lines = evidence.frame("log_lines", "mitigated")
    lines = lines[lines["text"].str.contains(f"StartFailed: .*{reason}", regex=True).fillna(False).astype(bool)]
    said = pd.MultiIndex.from_frame(cured[["repeat", "rank"]]).isin(pd.MultiIndex.from_frame(lines[["repeat", "rank"]]))
    ended = (~cured["ended"].astype(bool) & cured["exit_code"].eq(1) & said).fillna(False).astype(bool)
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        expected = int(ranks["arm"].eq("mitigated").sum())
        mitigation = Mitigation.HELD if len(cured) == expected and bool((told | ended).all()) else Mitigation.FAILED
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control") and fine == controls,
        metrics={
            "ranks_that_went_on": symptoms.share(ranks, went_on),
            "time_to_error_s": symptoms.measure(tries[tries["error"].fillna("").ne("")], "took_s"),
        },
        because=f"Rank {FAILS} raised DistBackendError in {raised} of {runs} runs; {degraded} of {total} ranks went on with any back end, and"
        f" {silent} of {other_tries} other ranks were ended by torchrun in the middle of their own initialisation without a word. Started by"
        f" the framework {int(told.sum())} of {len(cured)} ranks raised an error that has rank {FAILS} and its reason, and"
        f" {int(ended.sum())} that were stuck said so and ended.",
    )


NCCL = ("--backend", "nccl")
BROKEN = (f"nccl:fail,rank={FAILS},call=init,result=ncclUnhandledCudaError",)

gpu = scenario.with_variant(
    "gpu",
    title=f"{scenario.title} (NCCL, two GPUs)",
    certifies_not="The error is planted at the entry of ncclCommInitRankConfig; what makes a driver return it is another matter.",
    layer="nccl",
    needs=("linux", "torch", "cuda:2"),
    tags=("gpu",),
    measures_cost=False,
    repeats=1,
    control=Arm("worker.py", args=NCCL),
    fault=Arm("worker.py", args=NCCL, faults=BROKEN),
    mitigated=Arm("worker.py", args=(*NCCL, "--cured"), faults=BROKEN),
)
gpu.judge(judge)
