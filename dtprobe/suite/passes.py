"""Runs of scenarios, on pytest and xdist or on an engine, and what became of each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from dtprobe.errors import DtprobeError
from dtprobe.scenario import Scenario
from dtprobe.store.files import write_json
from dtprobe.suite import budget
from dtprobe.suite.plugin import ALONE, item_name
from dtprobe.suite.progress import Asked, Progress, Step
from dtprobe.suite.rows import Ran

if TYPE_CHECKING:
    from dtprobe.engines import Engine

PLUGIN = "dtprobe.suite.plugin"


class Follower(Protocol):
    """Is told how far a suite is."""

    def begin(self, total: int) -> None: ...

    def started(self, scenario: str) -> None: ...

    def ended(self, row: Ran) -> None: ...

    def end(self) -> None: ...


def told(row: Ran) -> dict[str, Any]:
    """A run's row as progress.json has it."""
    return {**vars(row), "metrics": dict(row.metrics)}


class Passes:
    """Runs steps, on pytest or on an engine, and keeps what became of each."""

    def __init__(
        self,
        scenarios: Mapping[str, Scenario],
        asked: Asked,
        *,
        folder: Path,
        out: Path,
        progress: Progress,
        follower: Follower,
        engine: Engine | None,
    ) -> None:
        self._scenarios = scenarios
        self._asked = asked
        self._folder = folder
        self._out = out
        self._progress = progress
        self._follower = follower
        self._engine = engine
        self.rows: dict[Step, Ran] = {step: Ran(**told) for step, told in progress.done.items()}
        self.interrupted = False

    def run(self, steps: Sequence[Step], until_ns: int | None, known: budget.Known) -> None:
        """Run these; afterwards `rows` has a row of each unless it was interrupted."""
        if not steps:
            return
        if self._engine is not None:
            return self._spread(steps)
        alone = [step for step in steps if ALONE in self._scenarios[step[0]].tags]
        self._pytest([step for step in steps if step not in alone], self._asked.jobs, until_ns, known)
        if not self.interrupted:
            self._pytest(alone, 1, until_ns, known)

    def _pytest(self, steps: Sequence[Step], jobs: int, until_ns: int | None, known: budget.Known) -> None:
        """Run these, so many at a time."""
        if not steps:
            return
        plan = {
            "steps": {name: [number for one, number in steps if one == name] for name, _ in steps},
            "belongs": {"night": self._folder.name},
            "until_ns": until_ns,
            "expects_s": {name: known.expects_s(name) for name, _ in steps},
        }
        path = self._folder / "plan.json"
        write_json(path, plan)
        follow = _Follow(self._scenarios, dict((item_name(*step), step) for step in steps), self._started, self._ended)
        code = pytest.main(self._arguments(path, [self._scenarios[name] for name, _ in steps], jobs), plugins=[follow])
        path.unlink(missing_ok=True)
        if follow.refused is not None:
            raise follow.refused
        if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            raise DtprobeError(
                f"the suite could not be run: {follow.trouble or pytest.ExitCode(code).name}", "report it with the command"
            )
        self.interrupted = code == pytest.ExitCode.INTERRUPTED

    def _spread(self, steps: Sequence[Step]) -> None:
        from dtprobe.suite import spread

        assert self._engine is not None
        for step in steps:
            self._started(step)
        self.interrupted = spread.run(
            [(self._scenarios[name], number) for name, number in steps],
            self._engine,
            out=self._out,
            folder=self._folder,
            asked=self._asked,
            ended=self._ended,
        )

    def _started(self, step: Step) -> None:
        self._progress.started(step)
        self._follower.started(item_name(*step))

    def _ended(self, row: Ran) -> None:
        self.rows[row.step] = row
        self._progress.ended(row.step, told(row))
        self._follower.ended(row)

    def _arguments(self, plan: Path, scenarios: Sequence[Scenario], jobs: int) -> list[str]:
        """Of a pytest that knows nothing of the project it is started in: no ini file, no conftest, no cache, no terminal, no temporary folder."""
        asked = self._asked
        files = dict.fromkeys(str(one.folder / "scenario.py") for one in scenarios)
        plugins = [
            word
            for name in (PLUGIN, "no:terminal", "no:cacheprovider", "no:faulthandler", "no:tmpdir")
            for word in ("-p", name)
        ]
        return [
            *("-c", os.devnull, "--rootdir", str(self._folder), "--noconftest", "--import-mode=importlib"),
            *plugins,
            *("-W", "ignore::pluggy.PluggyTeardownRaisedWarning"),  # an interrupt meets xdist's connections closed
            *("-n", str(jobs), "--dist", "load", "--maxschedchunk", "1"),  # each begins the longest that is left
            *("--scenarios", "--scenario-seed", str(asked.seed)),
            *("--scenario-out", str(self._out.resolve()), "--scenario-plan", str(plan)),
            *(("--scenario-repeats", str(asked.repeats)) if asked.repeats is not None else ()),
            *(("--scenario-world-size", str(asked.world_size)) if asked.world_size is not None else ()),
            *(("--scenario-launcher", asked.launcher) if asked.launcher is not None else ()),
            *files,
        ]


class _Follow:
    """A plugin of the controlling pytest: collects what the workers report."""

    def __init__(
        self,
        scenarios: Mapping[str, Scenario],
        steps: Mapping[str, Step],
        started: Callable[[Step], None],
        ended: Callable[[Ran], None],
    ) -> None:
        self._scenarios = scenarios
        self._steps = steps
        self._started = started
        self._ended = ended
        self.trouble = ""
        self.refused: DtprobeError | None = None
        """Why the night could not be taken down any further: a full disk."""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if (step := self._steps.get(nodeid.partition("::")[2])) is not None:
            self._started(step)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        step = self._steps.get(report.nodeid.partition("::")[2])
        if step is None or (report.when != "call" and report.outcome == "passed"):
            return
        told = dict(report.user_properties).get("dtprobe")
        self._ended(
            _ran(self._scenarios[step[0]], step, report.outcome, json.loads(str(told)) if told else None, _said(report))
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.trouble = _said(report)

    def pytest_internalerror(self, excrepr: object, excinfo: pytest.ExceptionInfo[BaseException]) -> bool:
        """True keeps pytest from printing its traceback: what happened is said in one line."""
        self.trouble = str(excrepr).strip().splitlines()[-1]
        if isinstance(excinfo.value, DtprobeError):
            self.refused = excinfo.value
        return True


def _ran(scenario: Scenario, step: Step, outcome: str, told: Mapping[str, Any] | None, said: str) -> Ran:
    common: dict[str, Any] = {"scenario": scenario.id, "number": step[1], "title": scenario.title, "claim": scenario.claim}
    if told is None:
        return Ran(status="failed", because=said, **common)
    if "left_out" in told:
        return Ran(status="left-out", because=told["left_out"], **common)
    status = {"passed": "as-expected", "skipped": "unsupported"}.get(outcome, "not-as-expected")
    same = ("verdict", "expected", "mitigation", "because", "took_s", "folder", "metrics", "seed", "host")
    return Ran(status=status, **common, **{name: told[name] for name in same})


def _said(report: pytest.TestReport | pytest.CollectReport) -> str:
    lines = str(report.longrepr or "").strip().splitlines()
    return lines[-1] if lines else ""
