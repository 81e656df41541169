"""Files as a meeting point: torch's FileStore and the shell's look-then-create, each with the races that it really has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dtprobe import Arm, Metric, Mitigation, Scenario, Verdict, VerdictKind, inotify, proc, strace

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Estimate, Evidence

SIGALRM = 14
LATE_S = 1.0
"""How much later than its timeout a store call may come back and still count as having kept it (busy machines)."""

SPINS = 0.5
"""Share of samples in which a waiting rank is runnable from which it spins; one that sleeps is so in under 0.05 of them."""

torn = Scenario(
    name="filestore-race",
    variant="torn",
    default=True,
    failure_mode="filestore-torn-record",
    title="A half-written record in a store file stops every rank that touches the store",
    claim="A rendezvous over files on shared storage fails by a race. (The document blames mkdir and touch, see the variant "
    "shell; FileStore calls neither.) Here: a writer that dies in mid-record makes every later store call hang past its timeout, "
    "one at full processor load with the file locked.",
    source="failure document, section 3.2; torch/csrc/distributed/c10d/FileStore.cpp",
    layer="store",
    certifies_not="Nothing about NFS: the file lies on a local file system. The cut comes from a file-size limit, as a quota or "
    "a full disk makes it, not from a network.",
    world_size=2,
    timeout_s=40,
    repeats=3,
    needs=("linux", "torch"),
    probes=(proc(hz=20), inotify(paths=("{folder}/shared",)), strace(calls="flock,mkdir,mkdirat,unlink,ftruncate")),
    control=Arm("worker.py", args=("--mode", "whole")),
    fault=Arm("worker.py", args=("--mode", "torn")),
    mitigated=Arm("worker.py", args=("--mode", "torn", "--store", "safe")),
    expect={"torch>=2.9": "reproduced"},
)


def _variant(variant: str, **changes: object) -> Scenario:
    fields: dict[str, object] = {
        "default": False,
        "world_size": 1,
        "probes": (proc(hz=20), inotify(paths=("{folder}/shared",))),
    }
    return torn.with_variant(variant, **{**fields, **changes})


stale = _variant(
    "stale",
    failure_mode="filestore-stale-file",
    title="The store file of a killed run breaks the next start",
    claim="A job that is killed leaves its store file, and the next start on that path reads the dead job's addresses.",
    source="failure document, section 3.2 (the race it looks for lies here); torch's FileStore documentation warns of reuse",
    certifies_not="Nothing about NFS. Each start is a job of two processes on one host, forked from the rank that counts them.",
    control=Arm("starts.py", args=("--case", "after", "--first", "ended")),
    fault=Arm("starts.py", args=("--case", "after", "--first", "killed")),
    mitigated=Arm("starts.py", args=("--case", "after", "--first", "killed", "--store", "safe")),
)

shared = _variant(
    "shared",
    failure_mode="filestore-stale-file",
    title="Two jobs on one store path form one group and reduce each other's data",
    claim="Two jobs that are started with one file path mix: ranks of different jobs form a group, and sums come out wrong "
    "without an error.",
    source="failure document, section 3.2 (the race it looks for lies here)",
    certifies_not="Nothing about NFS. Both jobs run on one host, forked from the rank that counts them.",
    control=Arm("starts.py", args=("--case", "beside", "--paths", "own")),
    fault=Arm("starts.py", args=("--case", "beside", "--paths", "one")),
    mitigated=Arm("starts.py", args=("--case", "beside", "--paths", "one", "--store", "safe")),
)

shell = _variant(
    "shell",
    failure_mode="file-claim-race",
    title="mkdir and touch after a look let several processes win",
    claim="Setting up a rendezvous folder with mkdir and touch is not atomic on NFS, so several workers believe they made it.",
    source="failure document, section 3.2",
    layer="filesystem",
    certifies_not="Nothing about NFS caching: the race is shown on a local file system, where it exists already.",
    probes=(proc(hz=20),),
    control=Arm("claim.py", args=("--mode", "turns")),
    fault=Arm("claim.py", args=("--mode", "race")),
    mitigated=Arm("claim.py", args=("--mode", "exclusive")),
)


@torn.judge
def judge_torn(evidence: Evidence) -> Verdict:
    """Which store calls came back, when, at what processor load, and who had the file locked meanwhile."""
    from dtprobe.stats import separated_counts

    calls = _store_calls(evidence)
    came = {
        arm: int((calls["arm"] == arm).sum()) == int((evidence.outcomes["arm"] == arm).sum()) for arm in calls["arm"].unique()
    }
    if not (came.get("control") and came.get("fault")):
        return _undecided("a rank ended before it came to its store call")
    hung = _share(calls, "hung")
    cores, runnable = _spin(evidence, calls)
    metrics = {
        "store_calls_hung": hung,
        "store_call_s": _measure(calls, "duration_s", "s"),
        "busiest_rank_while_hung": Metric(unit="cores", **cores),
        "runnable_while_hung": Metric(unit="share of samples", **runnable),
        "locked_out": Metric(unit="share of runs", **_locked_out(evidence)),
    }
    of = {arm: (int(some["hung"].sum()), len(some)) for arm, some in calls.groupby("arm")}
    well = evidence.outcomes[evidence.outcomes["arm"] == "control"]["exit_code"].eq(0).fillna(False).all()
    healthy = bool(of["control"][0] == 0 and calls.loc[calls["arm"] == "control", "error"].isna().all() and well)
    shown = separated_counts(*of["fault"], *of["control"])
    spinning = "fault" in runnable and runnable["fault"].value >= SPINS
    kind = VerdictKind.NOT_REPRODUCED
    if shown:
        kind = VerdictKind.REPRODUCED if spinning else VerdictKind.PARTLY
    cured = calls[calls["arm"] == "mitigated"]
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        # the record is lost, so the cure is a refusal in time, not a value
        held = came.get("mitigated") and not cured["hung"].any() and cured["error"].notna().all() and not cured["late"].any()
        mitigation = Mitigation.HELD if held else Mitigation.FAILED
    k, n = of["fault"]
    because = f"{k} of {n} store calls after the torn record never came back (asked to give up after {calls['timeout_s'].iloc[0]:g} s)"
    if spinning:
        because += f"; in each run one rank spun meanwhile ({cores['fault'].value:.2f} cores were left for it)"
    if (locked := metrics["locked_out"].fault) and locked.value:
        because += ", held the file's lock and kept the other waiting in the kernel"
    because += f". Control: {of['control'][0]} of {of['control'][1]}."
    if len(cured):
        said = cured["error"].dropna()
        because += (
            f" The safe store said within {cured['duration_s'].max():.2f} s: {_short(said.iloc[0]) if len(said) else 'nothing'}"
        )
    return Verdict(kind=kind, mitigation=mitigation, control_healthy=healthy, metrics=metrics, because=because)


@stale.judge
def judge_stale(evidence: Evidence) -> Verdict:
    """Starts that failed of those attempted, and how long they took to say so."""
    starts = _starts(evidence)
    return _judge_counts(
        evidence,
        starts,
        "failed",
        {"starts_failed": _share(starts, "failed"), "start_s": _measure(starts, "duration_s", "s")},
        "starts on the file of a killed job failed",
    )


@shared.judge
def judge_shared(evidence: Evidence) -> Verdict:
    """Jobs that got another job's data, and jobs that failed.

    One wrong sum is enough to show the claim: no noise makes it, only foreign data does. Failures show that it is no accident.
    """
    starts = _starts(evidence)
    metrics = {
        "jobs_mixed": _share(starts, "mixed"),
        "starts_failed": _share(starts, "failed"),
        "start_s": _measure(starts, "duration_s", "s"),
    }
    found = _judge_counts(evidence, starts, "mixed", metrics, "jobs summed data of the other job without an error")
    if found.kind is VerdictKind.INCONCLUSIVE:
        return found
    failed = starts[starts["arm"] == "fault"]
    wrong = sorted({value for values in failed["wrong_sums"] for value in values})
    because = f"{found.because} Wrong sums seen: {', '.join(f'{x:g}' for x in wrong) or 'none'} (right: 3 and 300)."
    because += f" {int(failed['failed'].sum())} of {len(failed)} jobs got no right result on every rank."
    kind = VerdictKind.NOT_REPRODUCED
    if _apart(starts, "failed"):
        kind = VerdictKind.REPRODUCED if failed["mixed"].any() else VerdictKind.PARTLY
    cured = starts[starts["arm"] == "mitigated"]
    mitigation = found.mitigation
    if len(cured) and cured["failed"].any():
        mitigation = Mitigation.FAILED
    return replace(found, kind=kind, mitigation=mitigation, because=because)


@shell.judge
def judge_shell(evidence: Evidence) -> Verdict:
    """Rounds that more than one contender won."""
    rounds = evidence.events("round").reindex(columns=["arm", "winners"])
    rounds = rounds.assign(several=rounds["winners"] > 1, none=rounds["winners"] < 1)
    metrics = {
        "rounds_with_several_winners": _share(rounds, "several"),
        "winners_per_round": _measure(rounds, "winners", "winners"),
    }
    return _judge_counts(evidence, rounds, "several", metrics, "rounds had more than one winner")


def _judge_counts(evidence: Evidence, trials: pd.DataFrame, bad: str, metrics: dict[str, Metric], what: str) -> Verdict:
    """The verdict on k of n: bad trials in the fault arm against none in control."""
    of = {arm: (int(some[bad].sum()), len(some)) for arm, some in trials.groupby("arm")}
    if not {"control", "fault"} <= set(of):
        return _undecided("an arm recorded no trial")
    clean = {arm: of.get(arm, (1, 1))[0] == 0 and _complete(evidence, arm) for arm in ("control", "mitigated")}
    if "failed" in trials:
        clean["control"] = clean["control"] and not trials.loc[trials["arm"] == "control", "failed"].any()
    kind = VerdictKind.REPRODUCED if _apart(trials, bad) else VerdictKind.NOT_REPRODUCED
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        mitigation = Mitigation.HELD if clean["mitigated"] else Mitigation.FAILED
    counts = ", ".join(f"{arm} {k} of {n}" for arm, (k, n) in sorted(of.items()) if arm in ("control", "mitigated"))
    because = f"{of['fault'][0]} of {of['fault'][1]} {what}; {counts}."
    return Verdict(kind=kind, mitigation=mitigation, control_healthy=clean["control"], metrics=metrics, because=because)


def _apart(trials: pd.DataFrame, bad: str) -> bool:
    from dtprobe.stats import separated_counts

    fault, control = (trials.loc[trials["arm"] == arm, bad] for arm in ("fault", "control"))
    return separated_counts(int(fault.sum()), len(fault), int(control.sum()), len(control)) and fault.mean() > control.mean()


def _complete(evidence: Evidence, arm: str) -> bool:
    """Whether the program that counts the trials ended by itself, with success, in every repeat."""
    outcomes = evidence.outcomes[evidence.outcomes["arm"] == arm]
    return len(outcomes) > 0 and bool(outcomes["exit_code"].eq(0).fillna(False).all())


def _store_calls(evidence: Evidence) -> pd.DataFrame:
    """One row a rank that came to its store call: how long it took, what it raised, whether it never came back."""
    import pandas as pd

    key = ["arm", "repeat", "rank"]
    columns = [*key, "began_ns", "timeout_s", "give_up_s", "duration_s", "error", "hung", "late"]
    begins, ends = evidence.events("store-call-begin"), evidence.events("store-call-end")
    begins = begins[begins["arm"] != "bare"]
    if begins.empty:
        return pd.DataFrame(columns=columns)
    ends = ends.reindex(columns=[*key, "duration_s", "error"])
    calls = begins.rename(columns={"t_ns": "began_ns"}).merge(ends, on=key, how="left")
    calls = calls.merge(evidence.outcomes[[*key, "signal", "timed_out"]], on=key, how="left")
    calls["hung"] = calls["duration_s"].isna() & (calls["signal"].eq(SIGALRM) | calls["timed_out"]).fillna(False).astype(bool)
    calls["duration_s"] = calls["duration_s"].fillna(calls["give_up_s"])  # of a hung call: at least so long
    calls["late"] = calls["duration_s"] > calls["timeout_s"] + LATE_S
    return calls[columns]


def _spin(evidence: Evidence, calls: pd.DataFrame) -> tuple[dict[str, Estimate], dict[str, Estimate]]:
    """Of the busiest rank of each run from the beginning of a store call that hung on: arm -> cores used, share of samples runnable.

    A rank that spins is runnable whatever the machine's load is; how much of a core it gets is not its affair.
    """
    from dtprobe.stats import measured

    samples = evidence.frame("proc")
    cores: dict[str, list[float]] = {}
    runnable: dict[str, list[float]] = {}
    for (arm, repeat), some in calls[calls["hung"]].groupby(["arm", "repeat"]):
        used, ran = [], []
        for call in some.itertuples():
            own = samples[(samples["arm"] == arm) & (samples["repeat"] == repeat) & (samples["rank"] == call.rank)]
            own = own[own["t_ns"] >= call.began_ns].sort_values("t_ns")
            if len(own) > 1:
                cpu_s = own["cpu_user_s"] + own["cpu_system_s"]
                used.append(float(cpu_s.iloc[-1] - cpu_s.iloc[0]) / (float(own["t_ns"].iloc[-1] - own["t_ns"].iloc[0]) / 1e9))
                ran.append(float((own["state"] == "R").mean()))
        if used:
            cores.setdefault(str(arm), []).append(max(used))
            runnable.setdefault(str(arm), []).append(max(ran))
    return {arm: measured(some) for arm, some in cores.items()}, {arm: measured(some) for arm, some in runnable.items()}


def _locked_out(evidence: Evidence) -> dict[str, Estimate]:
    """Arm -> share of runs in which a rank was seen waiting for the file's lock while another rank held it."""
    from dtprobe.stats import wilson

    locks = evidence.events("lock")
    found = {}
    for arm, outcomes in evidence.outcomes.groupby("arm"):
        runs = outcomes["repeat"].unique()
        seen = 0
        for repeat in runs:
            pids = set(outcomes.loc[outcomes["repeat"] == repeat, "pid"].dropna())
            own = locks[(locks["arm"] == arm) & (locks["repeat"] == repeat)]
            if own.empty:
                continue
            own = own[own["holder"].isin(pids)]
            seen += bool(own["waiting"].astype(bool).any() and (~own["waiting"].astype(bool)).any())
        if arm in ("control", "fault", "mitigated"):
            found[str(arm)] = wilson(seen, len(runs))
    return found


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


def _share(trials: pd.DataFrame, column: str) -> Metric:
    from dtprobe.stats import wilson

    found = {
        str(arm): wilson(int(some[column].sum()), len(some))
        for arm, some in trials.groupby("arm")
        if arm in ("control", "fault", "mitigated")
    }
    return Metric(unit="share", **found)


def _measure(trials: pd.DataFrame, column: str, unit: str) -> Metric:
    from dtprobe.stats import measured

    found: dict[str, Estimate] = {}
    for arm, some in trials.groupby("arm"):
        values: Sequence[float] = [float(x) for x in some[column].dropna()]
        if values and arm in ("control", "fault", "mitigated"):
            found[str(arm)] = measured(values)
    return Metric(unit=unit, **found)


def _short(text: str) -> str:
    """An error without the folder it names."""
    head, _, tail = text.partition("/log: ")
    return f"{head.split(':')[0]}: {tail or head}"[:160]


def _undecided(why: str) -> Verdict:
    return Verdict(kind=VerdictKind.INCONCLUSIVE, control_healthy=False, because=why)
