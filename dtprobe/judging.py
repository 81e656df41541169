"""From the arm runs to a checked verdict: evidence gathered, the judge called behind a seam, the result written."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd
from packaging.requirements import InvalidRequirement, Requirement

from dtprobe import machine, report, stats
from dtprobe.armrun import ArmRecord
from dtprobe.clock import Clock
from dtprobe.errors import Unavailable, UsageError
from dtprobe.evidence import OUTCOMES, Evidence
from dtprobe.readers.folder import SCHEMAS, read_folder
from dtprobe.readers.hosts import on_one_clock
from dtprobe.scenario import ARMS, Estimate, Metric, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.store import RunFolder, Store

CLAIMING = (VerdictKind.REPRODUCED, VerdictKind.PARTLY, VerdictKind.REFUTED, VerdictKind.NOT_REPRODUCED)
"""Verdicts that say something about the world."""


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder, its checked verdict, and what had been expected (None where nothing is pinned)."""

    folder: Path
    verdict: Verdict
    expected: str | None
    as_expected: bool
    json: Mapping[str, object] = field(repr=False)


def gather(
    folder: Path, world_size: int | None, records: Sequence[ArmRecord], unavailable: Mapping[str, Unavailable], seed: int
) -> Evidence:
    """Read every arm run's artifacts and put them under one roof; bare runs give outcomes and events only."""
    parts: dict[str, list[pd.DataFrame]] = {}
    rows = []
    suspicions = []
    for record in records:
        plan = record.plan
        frames = read_folder(record.folder)
        for name, frame in (on_one_clock(frames, record.hosts) if record.hosts else frames).items():
            if len(frame):
                parts.setdefault(name, []).append(frame.assign(arm=plan.arm_folder, repeat=plan.repeat))
        for one in record.exits:
            rows.append(
                {
                    "arm": plan.arm_folder,
                    "repeat": plan.repeat,
                    "traced": plan.traced,
                    "rank": one.rank,
                    "pid": one.pid,
                    "exit_code": one.exit_code,
                    "signal": one.signal,
                    "wall_s": one.wall_s,
                    "cpu_s": one.cpu_s,
                    "timed_out": one.timed_out,
                    "started_ns": record.started_ns,
                }
            )
        suspicions += [
            {"arm": plan.arm_folder, "repeat": plan.repeat, "t_ns": t_ns, "reason": reason} for t_ns, reason in record.suspected
        ]
    gathered = {}
    for name, some in parts.items():
        frame = pd.concat(some, ignore_index=True).astype({"arm": "string", "repeat": "Int64"})
        gathered[name] = SCHEMAS[name].check(frame, "arm", "repeat")
    return Evidence(
        folder=folder,
        seed=seed,
        world_size=world_size,
        outcomes=pd.DataFrame(rows, columns=list(OUTCOMES)).astype(OUTCOMES),
        frames=gathered,
        unavailable=dict(unavailable),
        suspicions=pd.DataFrame(suspicions, columns=["arm", "repeat", "t_ns", "reason"]),
    )


def verdict_of(scenario: Scenario, evidence: Evidence, arms: Sequence[str]) -> Verdict:
    """The judge's verdict, checked; a judge that raises gives `error`, never a claim about the world."""
    missing = [arm for arm in scenario.arms if arm not in arms]
    if missing:
        return Verdict(
            kind=VerdictKind.INCONCLUSIVE,
            control_healthy=False,
            because=f"only {', '.join(arms)} ran; without {', '.join(missing)} nothing can be compared",
        )
    try:
        return checked(scenario.judgement(evidence), scenario)
    except Exception as error:  # noqa: BLE001  a judge is foreign code
        (evidence.folder / "judge-error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Verdict(
            kind=VerdictKind.ERROR,
            control_healthy=False,
            because=f"the judge raised {type(error).__name__}: {error} at {Path(where.filename).name}:{where.lineno} "
            "(judge-error.txt has the whole of it)",
        )


def checked(verdict: Verdict, scenario: Scenario) -> Verdict:
    """The verdict as the rule of three arms allows it.

    A claim about the world needs a healthy control, a reason, and finite metrics with control and fault measured.
    """
    if not isinstance(verdict, Verdict):
        raise TypeError(f"the judge returned {type(verdict).__name__}, not a Verdict")
    if verdict.kind not in CLAIMING:
        return verdict
    for name, metric in verdict.metrics.items():
        for arm in ARMS:
            one = metric.arm(arm)
            if one is not None and not all(math.isfinite(x) for x in (one.value, one.low, one.high)):
                raise ValueError(f"metric {name!r} of arm {arm} is not finite: {one}")
    if not verdict.because.strip():
        raise ValueError("the verdict gives no reason")
    if not any(metric.control and metric.fault for metric in verdict.metrics.values()):
        raise ValueError(f"verdict {verdict.kind} without a metric of both control and fault")
    if not verdict.control_healthy:
        return replace(
            verdict,
            kind=VerdictKind.INCONCLUSIVE,
            because=f"control is not healthy, so nothing follows from the fault arm. {verdict.because}",
        )
    if scenario.mitigated is None and verdict.mitigation is not Mitigation.NONE:
        raise ValueError(f"mitigation {verdict.mitigation} without a mitigated arm")
    return verdict


def unsupported(unmet: Mapping[str, Unavailable]) -> Verdict:
    """The verdict of a scenario that this machine cannot run, with each unmet need and its remedy."""
    because = "; ".join(f"needs {need}: {reason}" for need, reason in unmet.items())
    return Verdict(kind=VerdictKind.UNSUPPORTED, control_healthy=False, because=because)


def expected(scenario: Scenario, torch_version: str | None) -> str | None:
    """The pinned verdict for this torch: the first specifier that admits it, or None where none does.

    Local version labels (`+cpu`) are ignored and pre-releases admitted. Raises UsageError for a malformed specifier.
    """
    for spec, kind in scenario.expect.items():
        try:
            requirement = Requirement(spec)
        except InvalidRequirement as error:
            raise UsageError(
                f"scenario {scenario.id}: expect key {spec!r} is no requirement", "write it as torch>=2.13"
            ) from error
        if torch_version and requirement.specifier.contains(torch_version.partition("+")[0], prereleases=True):
            return kind
    return None


def overhead(records: Sequence[ArmRecord], evidence: Evidence) -> dict[str, dict[str, object]]:
    """What the recorders cost the worker's wall time, from control runs with and without them.

    Time is what the worker recorded as `work` where it did, else the slowest rank's wall time. Light recorders are compared
    with bare runs, the traced repeat with the other probed ones.
    """
    works = evidence.events("work")
    bare: dict[int, tuple[float, str, tuple[str, ...]]] = {}
    light: dict[int, tuple[float, str, tuple[str, ...]]] = {}
    heavy: dict[int, tuple[float, str, tuple[str, ...]]] = {}
    for record in records:
        if record.plan.name != "control":
            continue
        own = works[(works["arm"] == record.plan.arm_folder) & (works["repeat"] == record.plan.repeat)]
        if len(own) and "duration_s" in own:
            time_s, what = float(own["duration_s"].max()), "the worker's timed work"
        else:
            time_s, what = max((one.wall_s for one in record.exits), default=0.0), "wall time of the slowest rank"
        if time_s <= 0:
            continue
        side = heavy if record.plan.traced else light if record.plan.probed else bare
        side[record.plan.repeat] = (time_s, what, tuple(record.recorded))
    found: dict[str, dict[str, object]] = {}
    paired = sorted(set(bare) & set(light))
    if paired:
        names = light[paired[0]][2]
        estimate = stats.ratio([light[r][0] for r in paired], [bare[r][0] for r in paired])
        found[" + ".join(names) or "none"] = _cost(estimate, light[paired[0]][1], "against runs without any")
    if heavy and light:
        time_s, what, names = next(iter(heavy.values()))
        more = [name for name in names if name not in next(iter(light.values()))[2]]
        if more:
            estimate = stats.ratio([time_s], [entry[0] for entry in light.values()])
            found[" + ".join(more)] = _cost(estimate, what, "against the runs with light recorders only")
    return found


def _cost(estimate: Estimate, what: str, against: str) -> dict[str, object]:
    return {
        "ratio": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "n": estimate.n,
        "method": estimate.method,
        "what": f"{what}, {against}",
    }


def conclude(
    store: Store,
    run_folder: RunFolder,
    scenario: Scenario,
    verdict: Verdict,
    *,
    seed: int,
    clock: Clock,
    overhead: Mapping[str, object] | None = None,
) -> RunResult:
    """Write verdict.json and the report, enter the run in the history, mark the folder finished."""
    torch_version = machine.versions().get("torch")
    pinned = expected(scenario, torch_version)
    as_expected = (
        verdict.kind.value == pinned if pinned else verdict.kind in CLAIMING
    ) and verdict.mitigation is not Mitigation.FAILED
    data = {
        "schema": "dtprobe.verdict/1",
        "scenario": scenario.id,
        "failure_mode": scenario.failure_mode,
        "verdict": verdict.kind.value,
        "mitigation": verdict.mitigation.value,
        "expected": pinned,
        "as_expected": as_expected,
        "metrics": {name: _metric_json(metric) for name, metric in verdict.metrics.items()},
        "because": verdict.because,
        "claim": scenario.claim,
        "overhead": dict(overhead or {}),
        "torch": torch_version,
        "run": run_folder.id,
        "seed": seed,
    }
    run_folder.write_verdict(data)
    run_folder.update(ended_ns=clock.now_ns())
    report.write(run_folder.path)
    store.finish(run_folder, now_ns=clock.now_ns)
    return RunResult(run_folder.path, verdict, pinned, as_expected, data)


def _metric_json(metric: Metric) -> dict[str, object]:
    arms = {name: one for name in ARMS if (one := metric.arm(name)) is not None}
    return {
        **{name: arms[name].value if name in arms else None for name in ARMS},
        "unit": metric.unit,
        "documented": metric.documented,
        "intervals": {name: [one.low, one.high] for name, one in arms.items()},
        "n": {name: one.n for name, one in arms.items()},
        "method": {name: one.method for name, one in arms.items()},
    }
