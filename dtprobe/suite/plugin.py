"""Scenarios as pytest items: `pytest -p dtprobe --scenarios FOLDER...`, also beside tests of one's own.

A `scenario.py` that pytest is given becomes one item a scenario. It passes where the verdict is the pinned one and the cure held, is
skipped where the machine lacks what the scenario needs, and fails otherwise. What came out is in the report's `user_properties` under
`dtprobe`, as JSON. Scenarios tagged `alone` run while no other does, on whichever workers of xdist.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dtprobe import catalog, runner
from dtprobe.errors import DtprobeError
from dtprobe.scenario import Scenario, VerdictKind
from dtprobe.suite import budget

COST_PAIRS = 1
"""Of a scenario: that of all scenarios together, and of all nights, tells what recorders cost."""

COST_EVERY = 2
"""Of so many nights one tells what recorders cost a scenario: its control without any is one run in seven."""

ALONE = "alone"
"""Tag of a scenario that no other may run beside: it measures times, or changes what the whole machine shares."""
PROPERTY = "dtprobe"
LOCK = ".suite.lock"
GATE = ".suite.gate"
"""Kept by whoever waits for the lock: nobody comes in before one that is to be alone and waits for those that run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dtprobe", "scenarios of dtprobe")
    group.addoption("--scenarios", action="store_true", help="collect scenario.py files as scenarios")
    group.addoption("--scenario", action="append", metavar="ID", help="only this scenario or variant; may be repeated")
    group.addoption("--scenario-out", type=Path, default=Path("runs"), metavar="DIR", help="folder for run folders (runs)")
    group.addoption("--scenario-seed", type=int, default=0, metavar="N", help="seed of workloads and injections (0)")
    group.addoption("--scenario-repeats", type=int, default=None, metavar="N", help="repeats of each arm (the scenario's own)")
    group.addoption("--scenario-world-size", type=int, default=None, metavar="N", help="ranks (the scenario's own)")
    group.addoption("--scenario-launcher", default=None, metavar="NAME", help="what starts the ranks (the scenario's own)")
    group.addoption(
        "--scenario-plan", type=Path, default=None, metavar="FILE", help="which runs of which scenarios, as a night plans them"
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.name == "scenario.py" and parent.config.getoption("scenarios"):
        return ScenarioFile.from_parent(parent, path=file_path)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest first, by what a night expects: what is begun last is short then, and the night's end full.

    Where it knows nothing of any, they are sorted by what they may take, and begun in turn from each third of these: the longest all need
    the lab's machine, and the first of them may have to build its image.
    """
    items.sort(key=_order)
    expected = {item.expects_s if isinstance(item, ScenarioItem) else None for item in items}
    if len(expected) == 1 and None not in expected:
        third = -(-len(items) // 3)
        turns = zip_longest(items[:third], items[third : 2 * third], items[2 * third :])
        items[:] = [item for turn in turns for item in turn if item is not None]


def _order(item: pytest.Item) -> tuple[float, float]:
    """Outside of nights all are equal, and stay where they are."""
    if not isinstance(item, ScenarioItem) or item.expects_s is None:
        return 0.0, 0.0
    return -item.expects_s, -budget.bound_s(item.scenario, None)


class NotAsExpected(Exception):
    """The verdict is not the pinned one, or the cure failed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a night wants of this pytest: its runs, each a scenario and a number, and until when another may be begun."""

    steps: Mapping[str, Sequence[int]] = field(default_factory=dict)
    belongs: Mapping[str, str] = field(default_factory=dict)
    until_ns: int | None = None
    expects_s: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path | None) -> Plan | None:
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path else None

    def measures_cost(self, scenario: str) -> bool:
        """Whether the scenario's control is also run without recorders: outside of nights always, in them by the night's own lot."""
        night = self.belongs.get("night")
        return night is None or Random(f"{night} {scenario}").random() * COST_EVERY < 1

    def too_late(self, scenario: str, now_ns: int) -> str:
        """Why a run may not be begun now; empty where it may."""
        needs_s = self.expects_s.get(scenario, 0.0)
        if self.until_ns is None or now_ns + needs_s * 1e9 <= self.until_ns:
            return ""
        left_s = max(0.0, (self.until_ns - now_ns) / 1e9)
        return f"takes about {needs_s:.0f} s, and {left_s:.0f} s of the budget are left"


def item_name(scenario: str, number: int) -> str:
    """`straggler`, and `straggler#2` for its second run in a night."""
    return f"{scenario}#{number + 1}" if number else scenario


class ScenarioFile(pytest.File):
    """A `scenario.py`; its scenarios and variants are the items."""

    def collect(self) -> Iterator[pytest.Item]:
        wanted = self.config.getoption("scenario")
        plan = Plan.of(self.config.getoption("scenario_plan"))
        for scenario in catalog.scenarios_of(self.path.parent):
            if wanted and scenario.id not in wanted:
                continue
            for number in (0,) if plan is None else plan.steps.get(scenario.id, ()):
                yield ScenarioItem.from_parent(
                    self, name=item_name(scenario.id, number), scenario=scenario, number=number, plan=plan or Plan()
                )


class ScenarioItem(pytest.Item):
    """One run of a scenario, in three arms, judged. Its seed is the suite's plus its number."""

    def __init__(self, *, scenario: Scenario, number: int, plan: Plan, **given: Any) -> None:
        super().__init__(**given)
        self.scenario = scenario
        self.number = number
        self.plan = plan
        self.expects_s = plan.expects_s.get(scenario.id)

    def runtest(self) -> None:
        out: Path = self.config.getoption("scenario_out")
        out.mkdir(parents=True, exist_ok=True)
        seed = self.config.getoption("scenario_seed") + self.number
        with _turn(out, alone=ALONE in self.scenario.tags):
            if why := self.plan.too_late(self.scenario.id, time.time_ns()):
                self.user_properties.append((PROPERTY, json.dumps({"left_out": why})))
                pytest.skip(why)
            began = time.monotonic()
            result = runner.run(
                self.scenario,
                out=out,
                repeats=self.config.getoption("scenario_repeats"),
                seed=seed,
                world_size=self.config.getoption("scenario_world_size"),
                launcher=self.config.getoption("scenario_launcher"),
                cost_pairs=COST_PAIRS if self.plan.measures_cost(self.scenario.id) else 0,
                argv=["dtprobe", "run", self.scenario.id, "--seed", str(seed)],
                belongs={**self.plan.belongs, "number": self.number} if self.plan.belongs else None,
            )
            took_s = time.monotonic() - began
        told = {
            **result.json,
            "folder": os.path.relpath(result.folder, out),
            "took_s": round(took_s, 3),
            "seed": seed,
            "host": socket.gethostname(),
        }
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
def _turn(out: Path, *, alone: bool) -> Iterator[None]:
    with ExitStack() as inside:
        with _locked(out / GATE, fcntl.LOCK_EX):
            inside.enter_context(_locked(out / LOCK, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, how)
        yield
    finally:
        os.close(lock)
