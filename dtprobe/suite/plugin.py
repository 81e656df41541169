"""Scenarios as pytest items: `pytest -p dtprobe.suite.plugin --scenarios FOLDER...`, also beside tests of one's own.

A `scenario.py` that pytest is given becomes one item a scenario. It passes where the verdict is the pinned one and the cure held, is
skipped where the machine lacks what the scenario needs, and fails otherwise. What came out is in the report's `user_properties` under
`dtprobe`, as JSON. Scenarios tagged `alone` run while no other does, on whichever workers of xdist.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dtprobe import catalog, runner
from dtprobe.errors import DtprobeError
from dtprobe.scenario import Scenario, VerdictKind

COST_PAIRS = 1
"""Of each scenario: that of all scenarios together, and of all nights, tells what recorders cost."""

ALONE = "alone"
"""Tag of a scenario that no other may run beside: it measures times, or changes what the whole machine shares."""
PROPERTY = "dtprobe"
LOCK = ".suite.lock"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dtprobe", "scenarios of dtprobe")
    group.addoption("--scenarios", action="store_true", help="collect scenario.py files as scenarios")
    group.addoption("--scenario", action="append", metavar="ID", help="only this scenario or variant; may be repeated")
    group.addoption("--scenario-out", type=Path, default=Path("runs"), metavar="DIR", help="folder for run folders (runs)")
    group.addoption("--scenario-seed", type=int, default=0, metavar="N", help="seed of workloads and injections (0)")
    group.addoption("--scenario-repeats", type=int, default=None, metavar="N", help="repeats of each arm (the scenario's own)")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.name == "scenario.py" and parent.config.getoption("scenarios"):
        return ScenarioFile.from_parent(parent, path=file_path)
    return None


class NotAsExpected(Exception):
    """The verdict is not the pinned one, or the cure failed."""


class ScenarioFile(pytest.File):
    """A `scenario.py`; its scenarios and variants are the items."""

    def collect(self) -> Iterator[pytest.Item]:
        wanted = self.config.getoption("scenario")
        for scenario in catalog.scenarios_of(self.path.parent):
            if not wanted or scenario.id in wanted:
                yield ScenarioItem.from_parent(self, name=scenario.id, scenario=scenario)


class ScenarioItem(pytest.Item):
    """One scenario, run in three arms and judged."""

    def __init__(self, *, scenario: Scenario, **given: Any) -> None:
        super().__init__(**given)
        self.scenario = scenario

    def runtest(self) -> None:
        out: Path = self.config.getoption("scenario_out")
        out.mkdir(parents=True, exist_ok=True)
        with _turn(out / LOCK, alone=ALONE in self.scenario.tags):
            began = time.monotonic()
            result = runner.run(
                self.scenario,
                out=out,
                repeats=self.config.getoption("scenario_repeats"),
                seed=self.config.getoption("scenario_seed"),
                cost_pairs=COST_PAIRS,
                argv=["dtprobe", "run", self.scenario.id],
            )
            took_s = time.monotonic() - began
        told = {**result.json, "folder": os.path.relpath(result.folder, out), "took_s": round(took_s, 3)}
        self.user_properties.append((PROPERTY, json.dumps(told)))
        if result.verdict.kind is VerdictKind.UNSUPPORTED:
            pytest.skip(result.verdict.because)
        if not result.as_expected:
            raise NotAsExpected(
                f"{result.verdict.kind}, cure {result.verdict.mitigation}, expected {result.expected}: {result.verdict.because}"
            )

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **kwargs: Any) -> Any:
        if isinstance(excinfo.value, NotAsExpected | DtprobeError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *args, **kwargs)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"scenario {self.scenario.id}"


@contextmanager
def _turn(path: Path, *, alone: bool) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
    finally:
        os.close(lock)
