"""A barrier in `finally` waits for peers that wait elsewhere: the exception shows only when the timeout has passed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

CULPRIT = 1
TIMEOUT_S = 5.0
HIDDEN_S = 0.9 * TIMEOUT_S
SOON_S = 0.5 * TIMEOUT_S

ARGS = ("--timeout-s", str(TIMEOUT_S))
RAISES = (f"process:exception,rank={CULPRIT},op=barrier,group=own,nth=6,type=ValueError",)

scenario = Scenario(
    name="cleanup-deadlock-after-exception",
    failure_mode="cleanup-deadlock-after-exception",
    title="Cleanup in a finally block hides an exception for as long as the timeout",
    claim="When one rank raises and its finally block meets the others in a barrier, it waits there while they wait in their "
    "all-reduce: nothing is printed until the timeout has passed, and then the first error of every rank is a timeout.",
    source="failure modes people meet",
    layer="code",
    certifies_not="Nothing about NCCL, where destroying the group itself may block as well.",
    world_size=2,
    timeout_s=60,
    repeats=2,
    control=Arm("worker.py", args=ARGS),
    fault=Arm("worker.py", args=ARGS, faults=RAISES),
    mitigated=Arm("worker.py", args=(*ARGS, "--cured"), faults=RAISES),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """How long after it was raised the exception left the job, on the rank that raised it, and as what."""
    jobs = symptoms.attempts(evidence, "job")
    if verdict := symptoms.undecided(evidence, {"job": jobs}):
        return verdict
    rows = surfaced(evidence, jobs)
    hidden = rows["hidden_s"].ge(HIDDEN_S) & rows["error"].ne("ValueError")
    open_at_once = rows["hidden_s"].le(SOON_S) & rows["error"].eq("ValueError")
    late, raised = symptoms.counts(rows, hidden, "fault")
    soon, _ = symptoms.counts(rows, open_at_once, "mitigated")
    runs = {
        arm: int(evidence.outcomes.loc[evidence.outcomes["arm"] == arm, "repeat"].nunique()) for arm in ("fault", "mitigated")
    }
    kind = VerdictKind.NOT_REPRODUCED
    if late:
        kind = VerdictKind.REPRODUCED if late == runs["fault"] else VerdictKind.PARTLY
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        mitigation = Mitigation.HELD if soon == runs["mitigated"] else Mitigation.FAILED
    after = rows.groupby("arm")["hidden_s"].median()
    because = f"Rank {CULPRIT} raised ValueError in {raised} of {runs['fault']} runs; in {late} of them it left the job {HIDDEN_S:g} s or more later, as another error."
    if "fault" in after and raised:
        text = str(rows.loc[rows["arm"] == "fault", "text"].iloc[0]).partition("] ")[2][:90]
        because += f' (Median {after["fault"]:.2f} s; the job ended with "{text}".)'
    if "mitigated" in after:
        because += f" In a job of the framework it left as itself within {SOON_S:g} s in {soon} of {runs['mitigated']}, after {after['mitigated']:.2f} s."
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control") and symptoms.unmarred(jobs, "control"),
        metrics={"hidden_s": symptoms.measure(rows, "hidden_s"), "jobs_failed": symptoms.share(jobs, jobs["error"].ne(""))},
        because=because,
    )


def surfaced(evidence: Evidence, jobs: pd.DataFrame) -> pd.DataFrame:
    """One row a run in which rank CULPRIT raised: `hidden_s` until the error left the job, and which error that was."""
    key = ["arm", "repeat", "rank"]
    raised = evidence.events("raised").reindex(columns=[*key, "t_ns", "type"])
    raised = raised[raised["type"].eq("ValueError") & raised["rank"].eq(CULPRIT)]
    left = evidence.events("left").reindex(columns=[*key, "t_ns"])
    found = raised.merge(left, on=key, suffixes=("", "_left")).merge(jobs[[*key, "error", "text"]], on=key)
    return found.assign(hidden_s=(found["t_ns_left"] - found["t_ns"]) / 1e9)
