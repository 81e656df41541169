"""References that outlive `destroy_process_group` keep gloo's threads and descriptors; all-reduces by themselves do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Metric, Mitigation, Scenario, Verdict, VerdictKind, perf, proc, strace
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Estimate, Evidence

REFERENCES = ("group_handle", "work", "ddp_module", "exception")
"""Stages of the worker in their order: each keeps another kind of reference."""

COUNTED = {"threads": "threads/cycle", "fds": "descriptors/cycle", "maps": "mappings/cycle"}

LEAK = 0.5
"""Threads or descriptors a cycle from which growth is a leak: the smallest real one is 1 (a kept Work), noise is below 0.2."""

CLAIMED_THREADS = 44
CLAIMED_MMAP = 1715

scenario = Scenario(
    name="gloo-thread-leak",
    failure_mode="gloo-thread-leak",
    title="References keep a destroyed gloo group's threads and descriptors alive",
    claim="100 all-reduces on gloo leak: mmap goes from 127 to 1842 and threads from 3 to 47, because a thread is not joined on "
    "an exception path.",
    source="failure document, section 2.2",
    layer="c10d",
    certifies_not="Nothing about NCCL communicators, nor about leaks inside a single group's lifetime beyond 100 all-reduces.",
    world_size=2,
    timeout_s=60,
    repeats=2,  # of two ranks each; the counts do not scatter, and a third would take it past a minute on two cores
    needs=("linux", "torch"),
    probes=(
        proc(hz=20),
        strace(calls="clone,clone3,mmap,munmap"),
        perf(record=("syscalls:sys_enter_mmap", "syscalls:sys_enter_clone3"), count=("page-faults",)),
    ),
    control=Arm("worker.py", args=("--mode", "dropped")),
    fault=Arm("worker.py", args=("--mode", "kept")),
    mitigated=Arm("worker.py", args=("--mode", "scoped")),
    expect={"torch>=2.9": "partly"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Slopes a cycle from `/proc`, each arm and kind of reference; the document's figures against the same 100 all-reduces."""
    from dtprobe.stats import separated

    levels = _levels(evidence)
    if levels.empty:
        return _undecided("no rank came to its first rest")
    slopes = {(name, what): _slopes(levels, name, what) for name in REFERENCES for what in COUNTED}
    metrics = {f"{what}_per_{name}": _metric(found, COUNTED[what]) for (name, what), found in slopes.items()}
    threads = _growth(levels, "before-all-reduces", "after-all-reduces", "threads")
    metrics["threads_over_100_all_reduces"] = _metric(threads, "threads", f"+{CLAIMED_THREADS} (3 to 47)")
    maps = _growth(levels, "before-all-reduces", "after-all-reduces", "maps")
    metrics["maps_over_100_all_reduces"] = _metric(maps, "mappings", f"+{CLAIMED_MMAP} (127 to 1842)")
    calls = _calls(evidence, "mmap")
    for recorder, pairs in calls.items():
        metrics[f"mmap_calls_over_100_all_reduces_{recorder}"] = _metric(
            _added(pairs), "calls", f"+{CLAIMED_MMAP} (127 to 1842)"
        )
    for recorder, pairs in _calls(evidence, "clone3").items():
        metrics[f"clone3_calls_over_100_all_reduces_{recorder}"] = _metric(
            _added(pairs), "calls", f"+{CLAIMED_THREADS} (3 to 47)"
        )
    outlived = {name: _outlived(evidence, name) for name in REFERENCES}
    for name, found in outlived.items():
        if found:
            metrics[f"threads_not_ended_per_{name}_strace"] = _metric(found, COUNTED["threads"])
    after = _growth(levels, "after-all-reduces", "released", "threads")
    metrics["threads_after_letting_go"] = _metric(after, "threads")

    if any("fault" not in found or "control" not in found for found in slopes.values()):
        return _undecided("an arm ended before its last rest", metrics)
    healthy = _clean(slopes, "control") and symptoms.ended_well(evidence, "control")
    leaking = [
        name
        for name in REFERENCES
        if min(slopes[name, "threads"]["fault"]) >= LEAK
        and separated(slopes[name, "threads"]["fault"], slopes[name, "threads"]["control"])
        # where the calls were traced, these threads were started and have not ended
        and min(outlived[name].get("fault", [LEAK])) >= LEAK > max(outlived[name].get("control", [0.0]))
    ]
    started = [one for some in _calls(evidence, "clone3").values() for pairs in _added(some).values() for one in pairs]
    most = max([*(max(samples) for samples in threads.values()), *started])
    refuted = most < CLAIMED_THREADS / 10
    shown = most > CLAIMED_THREADS / 2
    if leaking:
        kind = VerdictKind.PARTLY if refuted else VerdictKind.REPRODUCED if shown else VerdictKind.NOT_REPRODUCED
    else:
        kind = VerdictKind.REFUTED if refuted else VerdictKind.NOT_REPRODUCED
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        held = _clean(slopes, "mitigated") and symptoms.ended_well(evidence, "mitigated")
        mitigation = Mitigation.HELD if held else Mitigation.FAILED
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=healthy,
        metrics=metrics,
        because=f"{_because(metrics, levels, leaking, calls)} {_ends(outlived)} {_seen(levels)}",
    )


def _levels(evidence: Evidence) -> pd.DataFrame:
    """What `/proc` shows of a rank while it rests: one row an arm, repeat, rank and stage.

    Medians of the samples taken from outside in that window; a count that the sampler missed is the rank's own
    (`own` says how many of the three).
    """
    import pandas as pd

    key = ["arm", "repeat", "rank"]
    samples = {where: own for where, own in evidence.frame("proc").groupby(key)}
    rows = []
    for one in evidence.events("rest").itertuples():
        if one.arm == "bare":
            continue
        row = {"arm": one.arm, "repeat": one.repeat, "rank": one.rank, "stage": one.stage, "cycles": one.cycles, "own": 0}
        own = samples.get((one.arm, one.repeat, one.rank))
        for what in COUNTED:
            seen = (
                []
                if own is None
                else own.loc[own["t_ns"].between(one.t_ns - int(one.duration_s * 1e9), one.t_ns), what].dropna()
            )
            row["own"] += not len(seen)
            row[what] = float(seen.median()) if len(seen) else float(getattr(one, what))
        rows.append(row)
    return pd.DataFrame(rows, columns=[*key, "stage", "cycles", "own", *COUNTED])


def _growth(levels: pd.DataFrame, begin: str, end: str, what: str) -> dict[str, list[float]]:
    """Arm -> what was added between two stages, one value a repeat and rank in which both were seen."""
    table = levels.pivot_table(index=["arm", "repeat", "rank"], columns="stage", values=what)
    if begin not in table or end not in table:
        return {}
    added = (table[end] - table[begin]).dropna()
    return {str(arm): [float(x) for x in some] for arm, some in added.groupby("arm")}


STAGES = ("after-all-reduces", *REFERENCES)


def _outlived(evidence: Evidence, name: str) -> dict[str, list[float]]:
    """Arm -> threads a cycle that were started and had not ended when the stage was over, one value a traced rank (strace)."""
    key = ["arm", "repeat", "rank"]
    rests = evidence.events("rest").set_index([*key, "stage"])
    calls = evidence.frame("syscalls")
    started = (
        calls["name"].isin(["clone", "clone3"])
        & calls["args"].str.contains("CLONE_THREAD", regex=False).fillna(False)
        & calls["result"].ne("-1").fillna(False)
    )
    found: dict[str, list[float]] = {}
    for which, own in calls.assign(change=started.fillna(False).astype(int) - calls["kind"].eq("exit").astype(int)).groupby(
        key
    ):
        before, after = (rests.loc[(*which, stage)] if (*which, stage) in rests.index else None for stage in _around(name))
        if before is not None and after is not None:
            left = own.loc[own["t_ns"].between(before["t_ns"], after["t_ns"]), "change"].sum()
            found.setdefault(str(which[0]), []).append(float(left) / float(after["cycles"]))
    return found


def _ends(outlived: dict[str, dict[str, list[float]]]) -> str:
    found = {name: some["fault"] for name, some in outlived.items() if "fault" in some}
    if not found:
        return "Starts and ends of threads were not traced here."
    told = ", ".join(f"{name.replace('_', ' ')} {min(some):g}" for name, some in found.items())
    return f"Traced: threads a cycle that were started and had not ended when the stage was over: {told}."


def _around(name: str) -> tuple[str, str]:
    return STAGES[STAGES.index(name) - 1], name


def _slopes(levels: pd.DataFrame, name: str, what: str) -> dict[str, list[float]]:
    cycles = float(levels.loc[levels["stage"] == name, "cycles"].max())
    added = _growth(levels, *_around(name), what)
    return {arm: [x / cycles for x in some] for arm, some in added.items()}


def _calls(evidence: Evidence, name: str) -> dict[str, dict[str, list[tuple[int, int]]]]:
    """Recorder -> arm -> system calls of that name before and after the 100 all-reduces, one pair a traced rank."""
    syscalls = evidence.frame("syscalls")
    samples = evidence.frame("perf_samples")
    by = {
        "strace": syscalls[(syscalls["kind"] == "syscall") & (syscalls["name"] == name)],
        "perf": samples[samples["event"] == f"syscalls:sys_enter_{name}"],
    }
    key = ["arm", "repeat", "rank"]
    begins = evidence.events("all-reduces-begin").set_index(key)["t_ns"]
    ends = evidence.events("all-reduces-end").set_index(key)["t_ns"]
    found: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for recorder, rows in by.items():
        for which, own in rows.groupby(key):
            if which in begins.index and which in ends.index:
                pair = tuple(int((own["t_ns"] <= int(moment[which])).sum()) for moment in (begins, ends))
                found.setdefault(recorder, {}).setdefault(str(which[0]), []).append(pair)
    return found


def _added(pairs: dict[str, list[tuple[int, int]]]) -> dict[str, list[float]]:
    return {arm: [float(after - before) for before, after in some] for arm, some in pairs.items()}


def _clean(slopes: dict[tuple[str, str], dict[str, list[float]]], arm: str) -> bool:
    """Whether neither threads nor descriptors grow with the cycles; mappings may, since memory pools keep theirs."""
    found = [some.get(arm) for (_, what), some in slopes.items() if what != "maps"]
    return all(samples and max(samples) < LEAK for samples in found)


def _metric(samples: dict[str, list[float]], unit: str, documented: str = "") -> Metric:
    from dtprobe.stats import measured

    found: dict[str, Estimate] = {
        arm: measured(some) for arm, some in samples.items() if arm in ("control", "fault", "mitigated") and some
    }
    return Metric(unit=unit, documented=documented, **found)


def _seen(levels: pd.DataFrame) -> str:
    total, own = len(levels) * len(COUNTED), int(levels["own"].sum())
    return f"Of {total} counts {total - own} were sampled from outside, {own} are the ranks' own readings of /proc."


def _undecided(why: str, metrics: dict[str, Metric] | None = None) -> Verdict:
    return Verdict(kind=VerdictKind.INCONCLUSIVE, control_healthy=False, metrics=metrics or {}, because=why)


def _because(
    metrics: dict[str, Metric], levels: pd.DataFrame, leaking: list[str], calls: dict[str, dict[str, list[tuple[int, int]]]]
) -> str:
    def per_cycle(name: str) -> str:
        threads, fds = metrics[f"threads_per_{name}"].fault, metrics[f"fds_per_{name}"].fault
        return (
            f"{name.replace('_', ' ')} +{threads.value:g} threads and +{fds.value:g} descriptors" if threads and fds else name
        )

    one = levels[(levels["arm"] == "fault") & (levels["repeat"] == levels["repeat"].max()) & (levels["rank"] == 0)]
    before, after = (one.loc[one["stage"] == f"{when}-all-reduces", "threads"].median() for when in ("before", "after"))
    told = f"Over 100 all-reduces rank 0 went from {before:g} to {after:g} threads where the document has 3 to 47"
    for recorder, pairs in calls.items():
        if seen := pairs.get("fault"):
            told += f"; mmap calls from {seen[0][0]} to {seen[0][1]} by {recorder}"
    told += ", where it has 127 to 1842" if calls else "; mmap calls were not traced here, the mappings stand in for them"
    if not leaking:
        return f"{told}. No kept reference made threads outlive a destroyed group."
    kept = "; ".join(per_cycle(name) for name in leaking)
    return f"{told}. What does leak is a reference kept past destroy_process_group, a cycle: {kept}."
