"""What this machine can run, and what would fail: capabilities, and the scenarios measured against them.

`capability("cuda:2")` answers None, or why not and what helps. Nothing here imports torch or leaves anything behind.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from dtprobe.doctor.capabilities import FAMILIES, TABLE, Capability, Family, named
from dtprobe.doctor.host import Machine, Missing
from dtprobe.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from dtprobe.scenario import Scenario

__all__ = [
    "Answer",
    "Doctor",
    "DoctorReport",
    "Machine",
    "Missing",
    "ScenarioAnswer",
    "capability",
    "here",
    "report",
    "together",
]

SCHEMA = "dtprobe.doctor/1"
_THREADS = 8  # most checks wait for a short command


@dataclass(frozen=True)
class Answer:
    """Whether the machine has a capability: `unavailable` is None, or says why not."""

    name: str
    summary: str
    unavailable: Unavailable | None

    @property
    def remediable(self) -> bool:
        """Whether an apt or pip line alone would make it available."""
        return isinstance(self.unavailable, Missing)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "summary": self.summary,
            "available": self.unavailable is None,
            "reason": self.unavailable.reason if self.unavailable else "",
            "remedy": self.unavailable.remedy if self.unavailable else "",
            "remediable": self.remediable,
        }


@dataclass(frozen=True)
class ScenarioAnswer:
    """Whether a scenario can run: the needs that are not met, and the recorders that it would have to do without."""

    scenario: str
    unmet: tuple[Answer, ...]
    without: Mapping[str, Unavailable]

    @property
    def runnable(self) -> bool:
        return not self.unmet

    def as_json(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "runnable": self.runnable,
            "unmet": [answer.as_json() for answer in self.unmet],
            "without": {name: {"reason": why.reason, "remedy": why.remedy} for name, why in self.without.items()},
        }


@dataclass(frozen=True)
class DoctorReport:
    """The doctor's findings: scenario by scenario, then every capability of the table."""

    scenarios: tuple[ScenarioAnswer, ...]
    capabilities: tuple[Answer, ...]
    families: tuple[Family, ...] = FAMILIES

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "scenarios": [answer.as_json() for answer in self.scenarios],
            "capabilities": [answer.as_json() for answer in self.capabilities],
        }


class Doctor:
    """Answers about one machine, each found out once."""

    def __init__(self, machine: Machine | None = None, *, environ: Mapping[str, str] = os.environ) -> None:
        """`machine` is this one, in the environment `environ`, where it is left out."""
        self.machine = machine or Machine(environ=environ)
        self._answers: dict[str, Answer] = {}
        self._lock = threading.Lock()

    def answer(self, name: str) -> Answer:
        """The answer for a capability's name; raises UsageError with the closest names for an unknown one."""
        with self._lock:
            known = self._answers.get(name)
        return known or self._ask(name, named(name))

    def _ask(self, name: str, row: Capability) -> Answer:
        answer = Answer(name, row.summary, row.check(self.machine))
        with self._lock:
            return self._answers.setdefault(name, answer)

    def capability(self, name: str) -> Unavailable | None:
        """None where the machine has it, else why not; raises UsageError for an unknown name."""
        return self.answer(name).unavailable

    def unmet(self, names: Iterable[str]) -> dict[str, Unavailable]:
        """Those of the named capabilities that the machine lacks, and why."""
        return {name: why for name in names if (why := self.capability(name)) is not None}

    def runnable(self, scenario: Scenario) -> Unavailable | None:
        """None where every need of the scenario is met, else all reasons in one; `Missing` where packages alone would do."""
        return together(self.unmet(scenario.needs))

    def report(self, scenarios: Iterable[Scenario]) -> DoctorReport:
        """All of the scenarios and all of the table. A scenario that needs something unknown is told so; it hides no other."""
        chosen = tuple(scenarios)
        names = dict.fromkeys([*(row.name for row in TABLE), *(need for scenario in chosen for need in scenario.needs)])
        with ThreadPoolExecutor(_THREADS) as pool:
            answers = dict(zip(names, pool.map(self._answer_or_complaint, names), strict=True))
        probed: dict[str, Unavailable | None] = {}
        for scenario in chosen:
            for probe in scenario.probes:
                if repr(probe) not in probed:
                    probed[repr(probe)] = probe.probe()
        return DoctorReport(
            scenarios=tuple(
                ScenarioAnswer(
                    scenario.id,
                    tuple(answers[need] for need in scenario.needs if answers[need].unavailable is not None),
                    {probe.name: why for probe in scenario.probes if (why := probed[repr(probe)]) is not None},
                )
                for scenario in chosen
            ),
            capabilities=tuple(answers[row.name] for row in TABLE),
        )

    def _answer_or_complaint(self, name: str) -> Answer:
        try:
            return self.answer(name)
        except UsageError as error:
            return Answer(name, "", Unavailable(error.message, error.remedy))


def together(unmet: Mapping[str, Unavailable]) -> Unavailable | None:
    """Several unmet needs as one reason and remedy, None for none; `Missing` only where every one of them is."""
    if not unmet:
        return None
    reason = "; ".join(f"{name}: {why.reason}" for name, why in unmet.items())
    missing = [why for why in unmet.values() if isinstance(why, Missing)]
    if len(missing) == len(unmet):
        return Missing.all(missing, reason)
    return Unavailable(reason, "; ".join(dict.fromkeys(why.remedy for why in unmet.values() if why.remedy)))


@cache
def here() -> Doctor:
    """The doctor of this machine, as its environment is at the first call."""
    return Doctor()


def capability(name: str) -> Unavailable | None:
    """`here().capability(name)`."""
    return here().capability(name)


def report(scenarios: Iterable[Scenario]) -> DoctorReport:
    """`here().report(scenarios)`."""
    return here().report(scenarios)
