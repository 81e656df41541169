"""How many of the starts failed or mixed, and how many of the rounds had several winners."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dtprobe import Mitigation, Verdict, VerdictKind
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence, Metric


def stale(evidence: Evidence) -> Verdict:
    """Starts that failed of those attempted, and how long they took to say so."""
    starts = _starts(evidence)
    metrics = {
        "starts_failed": symptoms.share(starts, starts["failed"]),
        "start_s": symptoms.measure(starts, "duration_s"),
    }
    return _judged(evidence, starts, "failed", metrics, "starts on the file of a killed job failed")


def shared(evidence: Evidence) -> Verdict:
    """Jobs that got another job's data, and jobs that failed.

    One wrong sum is enough to show the claim: no noise makes it, only foreign data does. Failures show that it is no accident.
    """
    starts = _starts(evidence)
    metrics = {
        "jobs_mixed": symptoms.share(starts, starts["mixed"]),
        "starts_failed": symptoms.share(starts, starts["failed"]),
        "start_s": symptoms.measure(starts, "duration_s"),
    }
    found = _judged(evidence, starts, "failed", metrics, "jobs got no right result on every rank")
    if not metrics["jobs_mixed"].fault:
        return found
    fault = starts[starts["arm"].eq("fault")]
    mixed = int(fault["mixed"].sum())
    wrong = sorted({value for values in fault["wrong_sums"] for value in values})
    kind = found.kind
    if kind is VerdictKind.REPRODUCED and not mixed:
        kind = VerdictKind.PARTLY
    because = f"{mixed} of {len(fault)} jobs summed data of the other job without an error"
    because += f" ({', '.join(f'{x:g}' for x in wrong)} in place of 3 and 300). " if wrong else ". "
    return replace(found, kind=kind, because=because + found.because)


def shell(evidence: Evidence) -> Verdict:
    """Rounds that more than one contender won."""
    rounds = evidence.events("round").reindex(columns=["arm", "winners"])
    rounds = rounds.assign(several=rounds["winners"].gt(1))
    metrics = {
        "rounds_with_several_winners": symptoms.share(rounds, rounds["several"]),
        "winners_per_round": symptoms.measure(rounds, "winners", unit="winners"),
    }
    return _judged(evidence, rounds, "several", metrics, "rounds had more than one winner")


def _judged(evidence: Evidence, trials: pd.DataFrame, bad: str, metrics: dict[str, Metric], what: str) -> Verdict:
    """The verdict on k of n, bad trials in the fault arm against control: a race need not be lost each time to be one."""
    if (nothing := symptoms.undecided(evidence, {"trials": trials})) is not None:
        return nothing
    of = {arm: symptoms.counts(trials, trials[bad], arm) for arm in ("control", "fault", "mitigated")}
    clean = {arm: of[arm][1] > 0 and not of[arm][0] and symptoms.ended_well(evidence, arm) for arm in ("control", "mitigated")}
    kind = symptoms.apart(of["fault"], of["control"], whole=True)
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        mitigation = Mitigation.HELD if clean["mitigated"] else Mitigation.FAILED
    counts = ", ".join(f"{arm} {of[arm][0]} of {of[arm][1]}" for arm in ("control", "mitigated") if of[arm][1])
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=clean["control"],
        metrics=metrics,
        because=f"{of['fault'][0]} of {of['fault'][1]} {what}; {counts}." + symptoms.chance(kind),
    )


def _starts(evidence: Evidence) -> pd.DataFrame:
    """One row a start (arm, repeat, trial, job): whether a rank failed, whether one got a foreign sum, and how long it took."""
    import pandas as pd

    rows = []
    said = evidence.events("start")
    if len(said):
        for (arm, repeat, trial, job), ranks in said.groupby(["arm", "repeat", "trial", "job"]):
            wrong = ranks["sum"].notna() & (ranks["sum"] != ranks["expected"])
            rows.append(
                {
                    "arm": arm,
                    "repeat": repeat,
                    "trial": trial,
                    "job": job,
                    "failed": bool((ranks["sum"].isna() | wrong).any()),
                    "mixed": bool(wrong.any()),
                    "wrong_sums": tuple(ranks.loc[wrong, "sum"].astype(float)),
                    "duration_s": ranks["duration_s"].astype(float).max(),
                }
            )
    columns = ["arm", "repeat", "trial", "job", "failed", "mixed", "wrong_sums", "duration_s"]
    return pd.DataFrame(rows, columns=columns)
