"""One thing that has become worse, dated and with what else changed then."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["verdict", "metric", "cost", "gone"]

VERSIONS = ("torch", "python", "kernel", "host", "cores")
"""What may change between two runs beside the code."""


@dataclass(frozen=True, kw_only=True)
class Regression:
    """`before` and `after` are verdicts, or values in the metric's unit. `first_bad_run` and `last_good_run` are ids of runs, `first_bad_ns` is UTC.

    `changed` maps what differed between these two runs to both values; `commit_range` is `GOOD..BAD`, empty where the commit is the same or not
    known. `confidence` is 1 - p of the test that `because` names, after the correction for all tests of the night.
    """

    scenario: str
    metric: str = ""
    arm: str = ""
    kind: Kind
    before: str | float | None
    after: str | float | None
    unit: str = ""
    first_bad_run: str
    last_good_run: str
    first_bad_ns: int
    commit_range: str = ""
    changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    confidence: float
    because: str
    bisect: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def attributed(good: Mapping[str, Any], bad: Mapping[str, Any]) -> tuple[str, dict[str, tuple[str, str]]]:
    """The range of commits, and what else differs, between two runs' rows of the history."""
    changed = {
        name: (str(good[name]), str(bad[name]))
        for name in VERSIONS
        if _told(good.get(name)) and _told(bad.get(name)) and good[name] != bad[name]
    }
    old, new = good.get("git"), bad.get("git")
    return (f"{old}..{new}" if _told(old) and _told(new) and old != new else ""), changed


def _told(value: Any) -> bool:
    """Whether a column of the history has a value: null is None, NaN or NA there."""
    return value is not None and str(value) not in ("", "nan", "<NA>")


def bisecting(scenario: str, commit_range: str, changed: Mapping[str, tuple[str, str]], step: str = "") -> str:
    """The command that finds the first bad commit; where the commit is the same, one that shows it again. `step` are words of `history step`."""
    run = f"dtprobe history step {shlex.quote(scenario)}{step}"
    if commit_range:
        good, _, bad = commit_range.partition("..")
        return f"git bisect start {bad} {good} && git bisect run {run}"
    return run
