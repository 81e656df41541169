"""One host's clock is 30 s ahead: the logs, merged by their stamps, accuse the rank that only noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

SKEW_S = 30
CULPRIT = 1
SKEWED = (f"clock:skew,node=1,seconds={SKEW_S}",)

scenario = Scenario(
    name="clock-skew",
    failure_mode="clock-skew",
    title="One host's clock is 30 s ahead, and the logs accuse the wrong rank",
    claim="Where the clocks of hosts differ by more than a failure takes to spread, logs merged by their stamps show the failures in the wrong "
    "order, and the rank that merely noticed looks like the first to fail.",
    source="failure modes people meet: merged traces and logs of hosts whose clocks differ",
    layer="libc",
    certifies_not="Nothing about kernel clocks: both hosts run on one kernel, and the second one's wall clock is shifted in libc for all its "
    "processes. Nothing about leases and certificates, which a wrong clock breaks too.",
    world_size=2,
    launch="hosts:2",
    timeout_s=60,
    repeats=2,
    measures_cost=False,
    needs=("linux", "torch", "root", "netns", "veth", "mount", "cc"),
    control=Arm("worker.py"),
    fault=Arm("worker.py", faults=SKEWED),
    mitigated=Arm("worker.py", args=("--cured",), faults=SKEWED),
    expect={"torch>=2.9": "reproduced"},
    # what a run's folder keeps is the failure itself, and how far the clocks were off: with that the right rank is named
    looks_like=("python-exception-one-rank",),
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Whom the stamps in the logs accuse, and who was first on the clock of the machine that started the run."""
    runs = accused(evidence)
    if verdict := symptoms.undecided(evidence, {"failures of both ranks": runs}):
        return verdict
    wrong = runs["by_stamps"].ne(CULPRIT)
    misled, failed = symptoms.counts(runs, wrong, "fault")
    clean, well = symptoms.counts(runs, wrong, "control")
    cured, tried = symptoms.counts(runs, ~wrong, "mitigated")
    right, known = int(runs["on_one_clock"].eq(CULPRIT).sum()), len(runs)
    kind = VerdictKind.NOT_REPRODUCED
    if misled > clean:
        kind = VerdictKind.REPRODUCED if misled == failed else VerdictKind.PARTLY
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        mitigation = Mitigation.HELD if tried and cured == tried else Mitigation.FAILED
    apart = runs.loc[runs["arm"].eq("fault"), "apart_s"].median()
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=bool(well) and clean == 0,
        metrics={
            "wrong_rank_accused": symptoms.share(runs, wrong),
            "effect_after_cause": symptoms.measure(runs, "apart_s"),
            "right_on_one_clock": symptoms.share(runs, runs["on_one_clock"].eq(CULPRIT)),
        },
        because=f"Rank {CULPRIT} raised, the other rank's all-reduce failed for it. With host 1's clock ahead the stamps accused the wrong rank in "
        f"{misled} of {failed} runs (its error stands {apart:+.2f} s from its cause), with right clocks in {clean} of {well}. With stamps "
        f"corrected by an offset measured over the store the right rank was first in {cured} of {tried}; put on one clock by the offsets that the "
        f"run measured, in {right} of {known} runs of all arms.",
    )


def accused(evidence: Evidence) -> pd.DataFrame:
    """One row a run in which both ranks failed: who was first by the stamps that they wrote, and who on one clock."""
    import pandas as pd

    failed = evidence.events("failed")
    rows = []
    for (arm, repeat), own in failed.groupby(["arm", "repeat"]):
        if set(own["rank"]) != {0, 1}:
            continue
        by_rank = own.set_index("rank")
        rows.append(
            {
                "arm": arm,
                "repeat": repeat,
                "by_stamps": int(own.loc[own["stamp_ns"].idxmin(), "rank"]),
                "on_one_clock": int(own.loc[own["t_ns"].astype("int64").idxmin(), "rank"]),
                "apart_s": (int(by_rank.loc[1 - CULPRIT, "stamp_ns"]) - int(by_rank.loc[CULPRIT, "stamp_ns"])) / 1e9,
            }
        )
    columns = {"arm": "string", "repeat": "Int64", "by_stamps": "Int64", "on_one_clock": "Int64", "apart_s": "Float64"}
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)
