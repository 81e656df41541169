"""Many scenarios in one go, on pytest and xdist or on an engine: what each said, in one summary with links to their reports."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtprobe import machine
from dtprobe.catalog import Broken
from dtprobe.clock import Clock, SystemClock
from dtprobe.errors import UsageError
from dtprobe.scenario import Scenario
from dtprobe.store import Store
from dtprobe.store.files import write_json
from dtprobe.suite import baseline, budget, junit, past
from dtprobe.suite.passes import Follower, Passes, told
from dtprobe.suite.progress import Asked, Progress, Step, alive, held, read, resumable
from dtprobe.suite.rows import SCHEMA, Ran, SuiteResult, load, merged

if TYPE_CHECKING:
    from dtprobe.engines import Engine

__all__ = ["FOLDER", "SCHEMA", "Follower", "Night", "Ran", "SuiteResult", "load", "run"]

FOLDER = "suites"
"""Below `--out`: `<utc>-<pid>/` with progress.json, summary.json, summary.html, summary.md and junit.xml."""

SUSPECTS = 8
"""So many scenarios at most are run again because a metric looks worse: where more do, the machine is another, and a night is not to double."""
ROUNDS = (1, 1, 2, 16)
"""Further runs of what is suspected: few first, since noise shows itself at once."""

RETRIES = 3
"""So often is a scenario run again that was not as expected at once: with 0 of 4 the 95 % interval ends below one half."""


@dataclass(frozen=True, kw_only=True)
class Night:
    """What a night is to be.

    `runs` of each scenario; with one, a scenario that is not as expected is run `retries` times more. `budget_s` is the most that it may take:
    what does not fit is left out. `resume` (`latest`, an id or a folder) goes on with a night that was ended, and then only `jobs` counts of
    the rest. `world_size` and `launcher` stand in for the scenarios' own. `because` says why scenarios were chosen, `broken` are folders whose scenario.py cannot be loaded: rows that failed.
    `against` is a baseline (see `baseline`) to compare with.
    """

    jobs: int
    repeats: int | None = None
    seed: int = 0
    runs: int = 1
    retries: int = RETRIES
    budget_s: float | None = None
    resume: str | None = None
    world_size: int | None = None
    launcher: str | None = None
    because: Mapping[str, str] | None = None
    broken: Sequence[Broken] = ()
    against: baseline.Baseline | None = None


def run(
    scenarios: Sequence[Scenario],
    *,
    out: Path,
    night: Night,
    follower: Follower,
    engine: Engine | None = None,
    clock: Clock | None = None,
) -> SuiteResult:
    """Run the scenarios, `jobs` at a time, and write the summary into `<out>/suites/<utc>-<pid>/`.

    An interrupt ends what runs and is a result as well: what was not reached is `not-run`, and the night can be resumed. To resume one,
    `scenarios` are all that may be in it. Raises UsageError where nothing is to be run, `out` cannot be written or the night to be resumed
    still runs, DtprobeError where pytest or the engine failed.
    """
    clock = clock or SystemClock()
    _check(scenarios, night)
    if engine is not None and (missing := engine.probe()) is not None:
        raise UsageError(f"--on {engine.name}: {missing.reason}", missing.remedy)
    Store.open(out)
    if night.resume is None:
        folder, asked, began_ns, done = _begun(scenarios, out, night, clock)
    else:
        folder, asked, began_ns, done = _resumed(out, night)
    by_id = {one.id: one for one in scenarios}
    gone = sorted({name for name, _ in asked.steps} - by_id.keys())
    if gone:
        raise UsageError(
            f"{folder.name} has {gone[0]}, which is no scenario any more", "give its --path, or start another night"
        )
    with held(folder):
        return _run(by_id, folder, asked, began_ns, done, out=out, night=night, follower=follower, engine=engine, clock=clock)


def _run(
    by_id: Mapping[str, Scenario],
    folder: Path,
    asked: Asked,
    began_ns: int,
    done: Sequence[Ran],
    *,
    out: Path,
    night: Night,
    follower: Follower,
    engine: Engine | None,
    clock: Clock,
) -> SuiteResult:
    began = clock.monotonic()
    progress = Progress(folder, asked, began_ns, [told(row) for row in done])
    follower.begin(len(asked.steps))
    for row in done:
        follower.ended(row)
    passes = Passes(by_id, asked, folder=folder, out=out, progress=progress, follower=follower, engine=engine)
    known = budget.known(out / FOLDER)
    until_ns = None if night.budget_s is None else clock.now_ns() + int(night.budget_s * 1e9)
    try:
        passes.run([step for step in asked.steps if step not in passes.rows], until_ns, known)
        if asked.runs == 1 and not passes.interrupted:
            passes.run(_again(passes.rows, asked.retries), until_ns, known)
        for most in ROUNDS if asked.runs == 1 and asked.retries else ():
            if passes.interrupted or not (steps := _confirming(passes.rows, past.suspected(out, folder.name), most)):
                break
            passes.run(steps, until_ns, known)
    finally:
        follower.end()
    progress.end()
    earlier = past.earlier(out, folder.name)
    names = dict.fromkeys(name for name, _ in asked.steps)
    rows = [_row(by_id[name], passes.rows, earlier, asked) for name in names]
    rows += [
        Ran(scenario=name, status="left-out", because=why, title=by_id[name].title if name in by_id else "")
        for name, why in asked.left_out.items()
    ]
    rows += [
        Ran(scenario=one.folder.name, status="failed", because=f"{one.folder / 'scenario.py'} cannot be loaded: {one.error}")
        for one in night.broken
    ]
    result = SuiteResult(
        folder=folder,
        rows=tuple(rows),
        took_s=clock.monotonic() - began,
        interrupted=passes.interrupted,
        facts={
            "night": folder.name,
            "began_ns": began_ns,
            "seed": asked.seed,
            "repeats": asked.repeats,
            "jobs": asked.jobs,
            "runs": asked.runs,
            "resumed": night.resume is not None,
            "on": engine.name if engine else None,
            "budget_s": night.budget_s,
            "world_size": asked.world_size,
            "launcher": asked.launcher,
            "because": dict(asked.because),
            "regressions": past.regressions(out, folder.name),
            "machine": machine.machine_facts(environ=os.environ).as_json(),
            "versions": machine.versions(),
        },
    )
    if night.against is not None:
        told_apart = baseline.compared(night.against, result.as_json())
        result = replace(result, facts={**result.facts, "baseline": told_apart})
    data = result.as_json()
    write_json(folder / "summary.json", data)
    junit.write(folder, data)
    return result


def _check(scenarios: Sequence[Scenario], night: Night) -> None:
    if not scenarios and night.broken:
        raise UsageError(
            f"nothing else was chosen, and {night.broken[0].folder.name} is broken: {night.broken[0].error}", "mend it"
        )
    if not scenarios:
        raise UsageError("no scenario to run", "`dtprobe list` shows what there is")
    if night.jobs < 1:
        raise UsageError(f"--jobs {night.jobs}: nothing would run", "give 1 or more")
    if night.runs < 1:
        raise UsageError(f"--runs {night.runs}: nothing would run", "give 1 or more")
    if night.budget_s is not None and night.budget_s <= 0:
        raise UsageError(f"--budget {night.budget_s / 60:g}: no time at all", "give minutes, more than 0")


def _begun(scenarios: Sequence[Scenario], out: Path, night: Night, clock: Clock) -> tuple[Path, Asked, int, list[Ran]]:
    names, left_out = [one.id for one in scenarios], dict[str, str]()
    if night.budget_s is not None:
        known = budget.known(out / FOLDER)
        names, left_out = budget.within(names, known, budget_s=night.budget_s, jobs=night.jobs, runs=night.runs)
    asked = Asked(
        steps=tuple((name, number) for number in range(night.runs) for name in names),
        seed=night.seed,
        repeats=night.repeats,
        runs=night.runs,
        jobs=night.jobs,
        retries=night.retries,
        left_out=left_out,
        because=dict(night.because or {}),
        world_size=night.world_size,
        launcher=night.launcher,
    )
    began_ns = clock.now_ns()
    stamp = datetime.fromtimestamp(began_ns / 1e9, UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = out / FOLDER / f"{stamp}-{os.getpid()}"
    folder.mkdir(parents=True)
    return folder, asked, began_ns, []


def _resumed(out: Path, night: Night) -> tuple[Path, Asked, int, list[Ran]]:
    """The night as it was asked for, and what is done of it: by its own account, and by run folders that came to a verdict since."""
    folder = resumable(out, night.resume or "")
    data = read(folder)
    if alive(data):
        raise UsageError(f"--resume: {folder.name} still runs, as process {data['pid']}", "wait for its end, or end it")
    asked = replace(Asked.of(data["asked"]), jobs=night.jobs)
    done = [Ran(**one) for one in data["done"]]
    # What was not run because of an interrupt or the budget is run now.
    done = [row for row in done if row.status not in ("left-out", "not-run")]
    done += past.adopted(out, folder.name, {row.step for row in done})
    return folder, asked, int(data["began_ns"]), done


def _again(rows: Mapping[Step, Ran], retries: int) -> list[Step]:
    """Further runs of the scenarios whose first was not as expected."""
    odd = [name for (name, number), row in rows.items() if number == 0 and row.status in ("not-as-expected", "failed")]
    return [(name, number) for number in range(1, retries + 1) for name in odd if (name, number) not in rows]


def _confirming(rows: Mapping[Step, Ran], suspects: Mapping[str, int], most: int) -> list[Step]:
    """Further runs of scenarios whose metrics look worse, as many as are lacking to say so, `most` of each at a time; of SUSPECTS at most."""
    begun = Counter(name for name, _ in rows)
    return [
        (name, begun[name] + number) for name, lacks in list(suspects.items())[:SUSPECTS] for number in range(min(lacks, most))
    ]


def _row(scenario: Scenario, rows: Mapping[Step, Ran], earlier: Mapping[str, Any], asked: Asked) -> Ran:
    own = [row for (name, _), row in sorted(rows.items()) if name == scenario.id]
    if not own:
        return Ran(scenario=scenario.id, status="not-run", title=scenario.title, because="the night was interrupted")
    return merged(own, earlier.get(scenario.id, past.NOTHING))
