"""What a torn record does to the ranks that touch the store: which calls came back, and what the kernel was asked meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Set
from typing import TYPE_CHECKING

from dtprobe import Metric, Mitigation, Verdict, VerdictKind
from dtprobe.authoring import symptoms, syscalls

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Estimate, Evidence

CALL = "store call"
LATE_S = 1.0
"""How much later than its timeout a store call may come back and still count as having kept it (busy machines)."""

SPINS = 0.5
"""Share of samples in which a waiting rank is runnable from which it spins; one that sleeps is so in under 0.05 of them."""

AGAIN = 1000
"""So many reads that find nothing are spinning: a store that waits makes at most a hundred a second."""

KEYS = syscalls.KEYS

ENDING_S = 0.25
"""The ranks of an arm that is over are ended one after another, in so much time at most."""


def judged(evidence: Evidence, timeout_s: float) -> Verdict:
    """Which store calls came back, when, at what processor load, and who had the file locked meanwhile.

    Where the ranks were traced, the calls have to show it too: one rank reads at the file's end again and again, and the other
    is still in its flock.
    """
    calls = _store_calls(evidence, timeout_s)
    if (nothing := symptoms.undecided(evidence, {"store calls": calls})) is not None:
        return nothing
    came = {
        arm: int(calls["arm"].eq(arm).sum()) == int(evidence.outcomes["arm"].eq(arm).sum()) for arm in calls["arm"].unique()
    }
    if not (came["control"] and came["fault"]):
        return Verdict(
            kind=VerdictKind.INCONCLUSIVE, control_healthy=False, because="a rank ended before it came to its store call"
        )
    asked = _asked(evidence)
    stopped = set(zip(asked["arm"], asked["repeat"], strict=True))  # strace stops a rank at each call: it is not seen to run
    cores, runnable = _spin(evidence, calls, stopped)
    metrics = {
        "store_calls_hung": symptoms.share(calls, calls["hung"]),
        "store_call_s": symptoms.measure(calls, "took_s"),
        "busiest_rank_while_hung": Metric(unit="cores", **cores),
        "runnable_while_hung": Metric(unit="share of samples", **runnable),
        "locked_out": Metric(unit="share of runs", **_locked_out(evidence)),
        "reads_that_found_nothing": symptoms.measure(asked, "reads", unit="calls of the busiest rank"),
        "flock_that_never_came_back": symptoms.share(asked, asked["locked_out"]),
    }
    bad, clean = (symptoms.counts(calls, calls["hung"], arm) for arm in ("fault", "control"))
    seen = asked[asked["arm"].eq("fault")]
    spinning = "fault" in runnable or len(seen) > 0
    spinning = spinning and ("fault" not in runnable or runnable["fault"].value >= SPINS)
    spinning = spinning and bool(seen["reads"].ge(AGAIN).all() and seen["locked_out"].all())
    kind = symptoms.apart(bad, clean, whole=spinning)
    return Verdict(
        kind=kind,
        mitigation=_mitigation(evidence, calls, came.get("mitigated", False)),
        control_healthy=symptoms.unmarred(calls, "control") and symptoms.ended_well(evidence, "control"),
        metrics={name: metric for name, metric in metrics.items() if any(map(metric.arm, ("control", "fault", "mitigated")))},
        because=_because(calls, bad, clean, cores if spinning else {}, metrics["locked_out"], seen, timeout_s)
        + symptoms.chance(kind),
    )


def _because(
    calls: pd.DataFrame,
    bad: tuple[int, int],
    clean: tuple[int, int],
    cores: dict[str, Estimate],
    locked: Metric,
    seen: pd.DataFrame,
    timeout_s: float,
) -> str:
    because = f"{bad[0]} of {bad[1]} store calls after the torn record never came back (asked to give up after {timeout_s:g} s)"
    if "fault" in cores:
        because += f"; in each run one rank spun meanwhile ({cores['fault'].value:.2f} cores were left for it)"
    if locked.fault and locked.fault.value:
        because += ", held the file's lock and kept the other waiting in the kernel"
    because += f". Control: {clean[0]} of {clean[1]}."
    if len(seen):
        because += (
            f" Traced: that rank made {int(seen['reads'].median())} reads that found nothing; the other's flock"
            f" {'never came back' if seen['locked_out'].all() else 'came back'}."
        )
    else:
        because += " No system call was traced here."
    cured = calls[calls["arm"].eq("mitigated")]
    if len(cured):
        said = (cured["error"] + ": " + cured["text"])[cured["error"].ne("")].dropna()
        because += (
            f" The safe store said within {cured['took_s'].max():.2f} s: {_short(said.iloc[0]) if len(said) else 'nothing'}."
        )
    return because


def _mitigation(evidence: Evidence, calls: pd.DataFrame, came: bool) -> Mitigation:
    """The record is lost, so the cure is a refusal in time, not a value."""
    if not evidence.ran("mitigated"):
        return Mitigation.NONE
    cured = calls[calls["arm"].eq("mitigated")]
    held = came and cured["ended"].all() and cured["error"].ne("").all() and not cured["late"].any()
    return Mitigation.HELD if held else Mitigation.FAILED


def _store_calls(evidence: Evidence, timeout_s: float) -> pd.DataFrame:
    """One row a rank that came to its store call: `hung` never came back, `late` came long after its timeout."""
    calls = symptoms.attempts(evidence, CALL).merge(evidence.outcomes[[*KEYS, "signal", "timed_out"]], on=KEYS, how="left")
    given_up = calls["signal"].eq(signal.SIGALRM) | calls["timed_out"]
    hung = ~calls["ended"] & given_up.fillna(False)
    windows = syscalls.windows(evidence, CALL)
    calls = calls.merge(windows[[*KEYS, "begun_ns"]], on=KEYS, how="left")
    return calls.assign(hung=hung.astype(bool), late=calls["took_s"].gt(timeout_s + LATE_S).fillna(True).astype(bool))


def _asked(evidence: Evidence) -> pd.DataFrame:
    """One row a traced run: the most reads of the store that found nothing in one rank's call, and whether another's flock never returned.

    A flock that returns in the last moments of the rank that reads was let go by that rank's end, when the arm is over.
    """
    import pandas as pd

    made = syscalls.during(evidence, CALL, "read", "flock")
    made = made[made["path"].str.contains("/shared/", regex=False).fillna(False)]
    empty = made["name"].eq("read") & made["result"].eq("0")
    last = made[empty].groupby(["arm", "repeat"])["t_ns"].max().rename("last_ns")
    over = (
        made.merge(last, on=["arm", "repeat"], how="left").set_index(made.index)["last_ns"].astype("Float64") - ENDING_S * 1e9
    )
    returned = made["t_ns"].astype("Float64") + made["duration_s"].fillna(0) * 1e9
    waiting = made["name"].eq("flock") & (
        made["result"].isna() | (returned.ge(over) & made["duration_s"].gt(ENDING_S)).fillna(False)
    )
    rows = []
    for (arm, repeat), ranks in syscalls.traced(evidence).groupby(["arm", "repeat"]):
        own = made["arm"].eq(arm) & made["repeat"].eq(repeat)
        reads = made[own & empty].groupby("rank").size()
        out = bool(len(ranks) > 1 and (own & waiting).any())
        rows.append({"arm": arm, "repeat": repeat, "reads": float(reads.max()) if len(reads) else 0.0, "locked_out": out})
    return pd.DataFrame(rows, columns=["arm", "repeat", "reads", "locked_out"]).astype({"locked_out": "boolean"})


def _spin(
    evidence: Evidence, calls: pd.DataFrame, stopped: Set[tuple[str, int]]
) -> tuple[dict[str, Estimate], dict[str, Estimate]]:
    """Of the busiest rank of each run from the beginning of a store call that hung on: arm -> cores used, share of samples runnable.

    A rank that spins is runnable whatever the machine's load is; how much of a core it gets is not its affair.
    """
    from dtprobe.stats import measured

    samples = evidence.frame("proc")
    cores: dict[str, list[float]] = {}
    runnable: dict[str, list[float]] = {}
    for (arm, repeat), some in calls[calls["hung"]].groupby(["arm", "repeat"]):
        if (arm, repeat) in stopped:
            continue
        used, ran = [], []
        for call in some.itertuples():
            own = samples[(samples["arm"] == arm) & (samples["repeat"] == repeat) & (samples["rank"] == call.rank)]
            own = own[own["t_ns"] >= call.begun_ns].sort_values("t_ns")
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


def _short(text: str) -> str:
    """An error without the folder it names."""
    head, _, tail = text.partition("/log: ")
    return f"{head.split(':')[0]}: {tail or head}"[:160]
