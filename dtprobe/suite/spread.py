"""Steps of a night on the nodes of an engine: each is one `dtprobe run` there, and its run becomes one of ours.

Its folder lies in our `--out`, belongs to our night, and is entered once in our history, with the host that ran it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dtprobe import catalog
from dtprobe.engines import Done, Engine, Task
from dtprobe.scenario import Scenario
from dtprobe.store import RunFolder, Store
from dtprobe.store.archive import rows_of
from dtprobe.suite import budget, past
from dtprobe.suite.plugin import ALONE, item_name
from dtprobe.suite.progress import Asked
from dtprobe.suite.rows import Ran

FOLDER = "spread"
"""Of a night's folder: what is on its way from the nodes."""
BRINGS = "runs"


def run(
    steps: Sequence[tuple[Scenario, int]],
    engine: Engine,
    *,
    out: Path,
    folder: Path,
    asked: Asked,
    ended: Callable[[Ran], None],
) -> bool:
    """Run these steps of the night in `folder`, each a scenario and a number, and tell each row; whether that was interrupted.

    Raises as Engine.run does.
    """
    by_id = {item_name(scenario.id, number): (scenario, number) for scenario, number in steps}
    into = folder / FOLDER

    def take(done: Done) -> None:
        scenario, number = by_id[done.task]
        ended(_row(scenario, done, into / done.task, out, folder.name, number, asked.seed + number))
        shutil.rmtree(into / done.task, ignore_errors=True)  # histories and folders that nothing is left in

    try:
        engine.run([task(one, number, asked) for one, number in steps], into=into, ended=take)
    except KeyboardInterrupt:
        return True
    finally:
        if into.is_dir() and not list(into.iterdir()):
            into.rmdir()
    return False


def task(scenario: Scenario, number: int, asked: Asked) -> Task:
    """The task of one step, with the bound that its scenario's own bounds add up to. The seed is the night's plus the step's number."""
    argv = ["run", scenario.id, "--json", "--out", BRINGS, "--seed", str(asked.seed + number)]
    for option, value in (("--repeats", asked.repeats), ("--world-size", asked.world_size), ("--launcher", asked.launcher)):
        if value is not None:
            argv += [option, str(value)]
    if scenario.folder not in catalog.content_folders("scenarios"):  # it is nowhere that a node would look by itself
        argv += ["--path", str(scenario.folder)]
    return Task(
        id=item_name(scenario.id, number),
        argv=tuple(argv),
        timeout_s=budget.bound_s(scenario, asked.repeats),
        brings=BRINGS,
        alone=ALONE in scenario.tags,
    )


def _row(scenario: Scenario, done: Done, brought: Path, out: Path, night: str, number: int, seed: int) -> Ran:
    """The row of a run, from what its node brought: one run folder, unless the node or the harness failed."""
    found = None
    for path in Store(brought).paths() if brought.is_dir() else ():
        found = _entered(path, brought, out, night, number)
    verdict = found.verdict() if found else None
    if found is not None and verdict is not None:
        row = past.row_of(found, verdict, out)
        return replace(row, host=done.host or row.host, attempts=done.attempts, versions=dict(done.versions))
    why = done.problem or _last(done.stderr) or f"exit code {done.exit_code} and no verdict"
    return Ran(
        scenario=scenario.id,
        number=number,
        status="failed",
        because=why,
        took_s=done.took_s,
        title=scenario.title,
        claim=scenario.claim,
        seed=seed,
        host=done.host,
        attempts=done.attempts,
        versions=dict(done.versions),
    )


def _entered(path: Path, brought: Path, out: Path, night: str, number: int) -> RunFolder:
    """First into the history, then into place: a kill in between enters it once more under its own id, which changes nothing."""
    run = RunFolder.open(path)
    run.update(night=night, number=number)
    verdict = run.verdict()
    if verdict is not None and run.state == "finished":
        Store(out).history.append(rows_of(run.facts, verdict))
    place = out / path.relative_to(brought)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, place)
    return RunFolder.open(place)


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].removeprefix("dtprobe: ") if lines else ""
