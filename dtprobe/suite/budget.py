"""Which scenarios fit into the time that a night may take, and in which order they are wanted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtprobe.errors import UsageError
from dtprobe.scenario import Scenario
from dtprobe.suite import rows

NIGHTS = 20
"""So many of the latest nights tell how long a scenario takes and when it was run last."""
UNKNOWN_S = 60.0
"""Taken for a scenario of which nothing is known, where nothing is known of any."""
START_S = 120.0
"""To import, to look what the machine has, to judge and to print; the bounds of a scenario's arms come on top."""
SLACK = 1.15
"""Durations scatter, and the end of a night is not full."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """Of each scenario: durations of its runs in seconds, its last status, and the start (ns) of the last night in which it ran."""

    took_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    last: Mapping[str, str] = field(default_factory=dict)
    when_ns: Mapping[str, int] = field(default_factory=dict)

    def expects_s(self, scenario: str) -> float:
        """The median of its runs, else of all, else a minute."""
        own = self.took_s.get(scenario)
        every = [one for some in self.took_s.values() for one in some]
        return statistics.median(own) if own else statistics.median(every) if every else UNKNOWN_S


def known(nights: Path) -> Known:
    """What the latest nights below `<out>/suites` say; damaged ones say nothing."""
    took: dict[str, list[float]] = {}
    last: dict[str, str] = {}
    when: dict[str, int] = {}
    for path in sorted(nights.glob("*/summary.json"), reverse=True)[:NIGHTS]:
        try:
            data = rows.load(path)
        except UsageError:
            continue
        for row in data["scenarios"]:
            if row["status"] in ("left-out", "not-run"):
                continue
            runs: Sequence[Mapping[str, Any]] = row.get("runs") or [row]
            took.setdefault(row["scenario"], []).extend(float(one["took_s"]) for one in runs if one["took_s"])
            last.setdefault(row["scenario"], row["status"])
            when.setdefault(row["scenario"], int(data["began_ns"]))
    return Known(took_s=took, last=last, when_ns=when)


def wanted_first(known: Known) -> Callable[[str], tuple[int, int]]:
    """Sorts scenarios: those that never ran, those that were not as expected, then those that ran longest ago."""

    def key(scenario: str) -> tuple[int, int]:
        if scenario not in known.last:
            return 0, 0
        return (2 if known.last[scenario] in ("as-expected", "unsupported") else 1), known.when_ns[scenario]

    return key


def within(
    scenarios: Sequence[str], known: Known, *, budget_s: float, jobs: int, runs: int
) -> tuple[list[str], dict[str, str]]:
    """The scenarios that fit, and for each of the others why not; raises UsageError where not even one does."""
    room_s = budget_s * jobs / SLACK
    kept: list[str] = []
    left: dict[str, str] = {}
    for name in sorted(scenarios, key=wanted_first(known)):
        needs_s = known.expects_s(name) * runs
        if needs_s <= room_s and needs_s <= budget_s:
            kept.append(name)
            room_s -= needs_s
        else:
            left[name] = f"takes about {needs_s:.0f} s, more than is left of the budget of {budget_s / 60:g} min"
    if not kept:
        least = min(known.expects_s(name) * runs for name in scenarios)
        raise UsageError(
            f"--budget {budget_s / 60:g}: no scenario fits, the shortest takes about {least:.0f} s", "give more minutes"
        )
    order = {name: at for at, name in enumerate(scenarios)}
    return sorted(kept, key=order.__getitem__), left


def bound_s(scenario: Scenario, repeats: int | None) -> float:
    """Seconds that a run may take: all arms in all repeats, and the control once more for each bare run."""
    arms_s = sum(arm.timeout_s or scenario.timeout_s for arm in scenario.arms.values())
    bare_s = 2 * (scenario.control.timeout_s or scenario.timeout_s)
    return START_S + bare_s + (repeats or scenario.repeats) * arms_s
