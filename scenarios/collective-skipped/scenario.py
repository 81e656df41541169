"""One rank leaves out an all-reduce: the others wait, and which rank is missing can be read before they give up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtprobe import Arm, Metric, Mitigation, Scenario, Verdict, VerdictKind, flight_recorder, proc, pyspy
from dtprobe.authoring import nccl

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Estimate, Evidence

WORLD_SIZE = 3
SKIPS = 1
"""The rank that every arm but control makes leave one out. The judge finds it from the frames and compares."""

TIMEOUT_S = 3.5
ARMS = ("control", "fault", "mitigated")


def _arm(*args: str) -> Arm:
    return Arm("worker.py", args=(*args, "--skip-rank", str(SKIPS), "--timeout-s", str(TIMEOUT_S)))


scenario = Scenario(
    name="collective-skipped",
    failure_mode="collective-skipped",
    title="A rank leaves out an all-reduce and the others wait for it",
    claim="When one rank leaves out a collective, the others wait until the timeout and fail with an error that names nobody; "
    "the flight recorder and the stacks name the missing rank before that.",
    source="failure modes people meet; torch flight recorder documentation",
    layer="code",
    certifies_not="Nothing about NCCL: its watchdog, its abort and the values after it differ.",
    world_size=WORLD_SIZE,
    timeout_s=60,
    repeats=2,  # of three ranks each; a third would take it past a minute on two cores
    needs=("linux", "torch"),
    probes=(proc(hz=10), flight_recorder(interval_s=0.25, suspect_s=1.0), pyspy()),
    control=_arm("--mode", "full"),
    fault=_arm("--mode", "away"),
    mitigated=_arm("--mode", "away", "--checked"),
    expect={"torch>=2.9": "reproduced"},
)

shifted = scenario.with_variant(
    "shifted",
    failure_mode="collective-skipped",
    title="A rank leaves out an all-reduce, goes on, and every later sum is wrong",
    claim="A rank that leaves out one all-reduce and goes on is not noticed: gloo pairs its next one with the others' last, so "
    "sums are wrong without an error from there to the end, where the others wait for one that never comes.",
    source="measured here; gloo matches collectives by their count on each rank",
    fault=_arm("--mode", "shifted"),
    mitigated=_arm("--mode", "shifted", "--checked"),
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Waiting ranks and their errors; the missing rank as frames name it, against the one that the arm declared."""
    if not {"control", "fault"} <= set(evidence.outcomes["arm"]):
        return _undecided("an arm did not run")
    failures = _failures(evidence)
    waited = failures[(failures["arm"] == "fault") & (failures["rank"] != SKIPS)]
    runs = {arm: _runs(evidence, arm) for arm in ARMS if evidence.ran(arm)}
    names = {arm: {repeat: _names(evidence, arm, repeat) for repeat in repeats} for arm, repeats in runs.items()}
    metrics = _metrics(evidence, failures, names)
    asked = (WORLD_SIZE - 1) * len(runs["fault"])
    hung = waited[waited["waited_s"] >= 0.9 * TIMEOUT_S]
    told = int(hung["names_culprit"].sum())
    named = {how: sum(found[how] == (SKIPS,) for found in names["fault"].values()) for how in ("recorder", "stacks")}
    stacks = evidence.frame("stacks")
    if stacks[stacks["arm"] == "fault"].empty:
        del named["stacks"]  # no recorder of stacks here: what it would have named is not known
    if len(hung) < asked or told:
        kind = VerdictKind.NOT_REPRODUCED
    else:
        kind = VerdictKind.REPRODUCED if min(named.values()) == len(runs["fault"]) else VerdictKind.PARTLY
    text = re.sub(r"^\[\S*\] ", "", hung["text"].iloc[0]) if len(hung) else ""
    because = (
        f"{len(hung)} of {asked} waiting ranks failed at their {TIMEOUT_S:g} s timeout, {told} of them with a rank's name"
        + (f' (they say "{text}")' if text else "")
        + f". Rank {SKIPS} was named from the flight recorder in {named['recorder']} of {len(runs['fault'])} runs"
        + (f" and from stacks in {named['stacks']}" if "stacks" in named else "; no stacks were taken here")
        + (f", {time.value:.1f} s after the last rank came" if (time := metrics["time_to_name_s"].fault) else "")
        + "."
    )
    return Verdict(
        kind=kind,
        mitigation=_mitigation(evidence, failures),
        control_healthy=_healthy(evidence, failures),
        metrics=metrics,
        because=f"{because} {_cured(failures)}".strip(),
    )


@shifted.judge
def judge_shifted(evidence: Evidence) -> Verdict:
    """Wrong sums that no error announced; the missing rank as frames name it at the end."""
    from dtprobe.stats import separated_counts

    if not {"control", "fault"} <= set(evidence.outcomes["arm"]):
        return _undecided("an arm did not run")
    failures = _failures(evidence)
    runs = {arm: _runs(evidence, arm) for arm in ARMS if evidence.ran(arm)}
    names = {arm: {repeat: _names(evidence, arm, repeat) for repeat in repeats} for arm, repeats in runs.items()}
    steps = evidence.events("step").reindex(columns=["arm", "sum", "right"])
    steps = steps.assign(wrong=steps["sum"] != steps["right"])
    wrong = {arm: (int(some["wrong"].sum()), len(some)) for arm, some in steps.groupby("arm") if arm in ARMS}
    if not {"control", "fault"} <= set(wrong):
        return _undecided("no step was recorded")
    metrics = {"wrong_sums": _shares(wrong), **_metrics(evidence, failures, names)}
    shown = separated_counts(*wrong["fault"], *wrong["control"]) and wrong["fault"][0] > 0
    hung = failures[(failures["arm"] == "fault") & (failures["waited_s"] >= 0.9 * TIMEOUT_S)]
    asked = (WORLD_SIZE - 1) * len(runs["fault"])
    kind = VerdictKind.NOT_REPRODUCED
    if shown:
        kind = VerdictKind.REPRODUCED if len(hung) == asked else VerdictKind.PARTLY
    mitigation = _mitigation(evidence, failures)
    if mitigation is Mitigation.HELD and wrong.get("mitigated", (0, 0))[0]:
        mitigation = Mitigation.FAILED
    named = sum(found["recorder"] == (SKIPS,) for found in names["fault"].values())
    because = (
        f"{wrong['fault'][0]} of {wrong['fault'][1]} sums were wrong before anything was raised, {wrong['control'][0]} of "
        f"{wrong['control'][1]} in control; then {len(hung)} of {asked} ranks waited out their timeout. "
        f"The flight recorder named rank {SKIPS} in {named} of {len(runs['fault'])} runs, but only at that end."
    )
    if "mitigated" in wrong:
        because += f" Checked: {wrong['mitigated'][0]} of {wrong['mitigated'][1]} sums wrong."
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=_healthy(evidence, failures) and wrong["control"][0] == 0,
        metrics=metrics,
        because=f"{because} {_cured(failures)}".strip(),
    )


def named_by_recorder(collectives: pd.DataFrame, moments: Sequence[int]) -> tuple[int, ...]:
    """Ranks that had not entered the default group's newest collective at the last of the moments (ns) at which some had not.

    When an operation was created is in every dump, also in those after the timeout; its state is not to be believed there, since
    on gloo a failed operation looks completed.
    """
    own = collectives[(collectives["group_desc"] == "default_pg") & (collectives["kind"] == "collective")]
    for moment in sorted(moments, reverse=True):
        last = own[own["t_ns"] <= moment].groupby("rank")["seq"].max()
        if behind := tuple(int(rank) for rank in last.index[last < last.max()]):
            return behind
    return ()


def named_by_stacks(stacks: pd.DataFrame) -> tuple[int, ...]:
    """Ranks whose main thread is in no collective while that of others is, in the last stacks that show it of one arm run."""
    own = stacks[stacks["thread_name"] == "MainThread"]
    own = own.assign(number=own["source"].str.extract(r"pyspy-(\d+)", expand=False).astype("Int64").fillna(0))
    for _, taken in sorted(own.groupby("number"), reverse=True, key=lambda one: one[0]):
        inside = taken["frames"].str.contains("distributed_c10d.py", regex=False).fillna(False).astype(bool)
        if inside.any() and not inside.all():
            return tuple(sorted({int(rank) for rank in taken.loc[~inside, "rank"]}))
    return ()


def _names(evidence: Evidence, arm: str, repeat: int) -> dict[str, tuple[int, ...]]:
    def own(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[(frame["arm"] == arm) & (frame["repeat"] == repeat)]

    moments = [int(t_ns) for t_ns in own(evidence.suspicions)["t_ns"]]
    return {
        "recorder": named_by_recorder(own(evidence.frame("collectives")), moments),
        "stacks": named_by_stacks(own(evidence.frame("stacks"))),
    }


def _runs(evidence: Evidence, arm: str) -> list[int]:
    return sorted(int(repeat) for repeat in evidence.outcomes.loc[evidence.outcomes["arm"] == arm, "repeat"].unique())


def _failures(evidence: Evidence) -> pd.DataFrame:
    """One row a rank whose step raised: how long it had waited, what it said, whether that names the culprit and nobody else."""
    found = evidence.events("error")
    found = found[found["arm"].isin(ARMS)].reindex(
        columns=["arm", "repeat", "rank", "t_ns", "step", "waited_s", "type", "text", "named"]
    )
    ranks = found["text"].astype(str).map(lambda text: {int(number) for number in re.findall(r"\brank (\d+)", text)})
    declared = found["named"].map(
        lambda named: {int(one) for one in str(named).split(",")} if isinstance(named, str) and named else None
    )
    return found.assign(
        names_culprit=[(own if own is not None else said) == {SKIPS} for own, said in zip(declared, ranks, strict=True)]
    )


def _metrics(
    evidence: Evidence, failures: pd.DataFrame, names: dict[str, dict[int, dict[str, tuple[int, ...]]]]
) -> dict[str, Metric]:
    from dtprobe.stats import measured

    outcomes = evidence.outcomes[evidence.outcomes["arm"].isin(ARMS)]
    failed = {arm: (int((~some["exit_code"].eq(0).fillna(False)).sum()), len(some)) for arm, some in outcomes.groupby("arm")}
    telling = {arm: (int(some["names_culprit"].sum()), len(some)) for arm, some in failures.groupby("arm")}
    # where nobody is missing, any name is a false one, and shows as such in control
    by = {
        how: {
            arm: (sum(found[how] == (SKIPS,) or (arm == "control" and found[how] != ()) for found in some.values()), len(some))
            for arm, some in names.items()
            if arm != "mitigated"  # there nobody hangs
        }
        for how in ("recorder", "stacks")
    }
    to_error: dict[str, Estimate] = {}
    to_name: dict[str, Estimate] = {}
    for arm, some in failures[failures["rank"] != SKIPS].groupby("arm"):
        to_error[arm] = measured([float(x) for x in some["waited_s"]])
        waits = []
        for repeat, own in some.groupby("repeat"):
            told = evidence.suspicions[(evidence.suspicions["arm"] == arm) & (evidence.suspicions["repeat"] == repeat)]
            came = (own["t_ns"].astype(float) - own["waited_s"].astype(float) * 1e9).max()
            later = told.loc[told["t_ns"].astype(float) >= came, "t_ns"]
            if len(later):
                waits.append((float(later.min()) - came) / 1e9)
        if waits:
            to_name[arm] = measured(waits)
    return {
        "ranks_failed": _shares(failed),
        "errors_naming_the_culprit": _shares(telling),
        "runs_named_by_flight_recorder": _shares(by["recorder"]),
        "runs_named_by_stacks": _shares(by["stacks"]),
        "time_to_name_s": Metric(unit="s", **to_name),
        "time_to_error_s": Metric(unit="s", **to_error),
    }


def _healthy(evidence: Evidence, failures: pd.DataFrame) -> bool:
    """No rank failed and no step raised."""
    codes = evidence.outcomes.loc[evidence.outcomes["arm"] == "control", "exit_code"]
    return bool(codes.eq(0).fillna(False).all()) and not (failures["arm"] == "control").any()


def _mitigation(evidence: Evidence, failures: pd.DataFrame) -> Mitigation:
    """Held where every rank, the culprit too, got an error that names the culprit, the others before the plain timeout."""
    if not evidence.ran("mitigated"):
        return Mitigation.NONE
    cured = failures[failures["arm"] == "mitigated"]
    complete = len(cured) == int((evidence.outcomes["arm"] == "mitigated").sum())
    in_time = (cured["waited_s"] < 0.9 * TIMEOUT_S).all()
    return Mitigation.HELD if complete and cured["names_culprit"].all() and in_time else Mitigation.FAILED


def _cured(failures: pd.DataFrame) -> str:
    cured = failures[failures["arm"] == "mitigated"]
    if cured.empty:
        return ""
    named = int(cured["names_culprit"].sum())
    return f"Checked: {named} of {len(cured)} ranks raised an error naming rank {SKIPS}, after {cured['waited_s'].max():.1f} s at most."


def _shares(counts: dict[str, tuple[int, int]]) -> Metric:
    from dtprobe.stats import wilson

    return Metric(unit="share", **{arm: wilson(k, n) for arm, (k, n) in counts.items() if arm in ARMS and n})


def _undecided(why: str) -> Verdict:
    return Verdict(kind=VerdictKind.INCONCLUSIVE, control_healthy=False, because=why)


gpu = nccl.variant(
    scenario,
    "skip",
    claim="On NCCL nothing raises in the ranks that wait: torch's watchdog ends them by SIGABRT after the timeout, and the flight recorder names "
    "the missing rank before.",
    probes=(flight_recorder(interval_s=0.25, suspect_s=1.0), pyspy()),
)


@gpu.judge
def judge_gpu(evidence: Evidence) -> Verdict:
    """How NCCL's waiting ranks end, and who is named before."""
    return nccl.judge(evidence, nccl.Claim())
