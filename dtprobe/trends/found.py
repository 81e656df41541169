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
    """The command that finds what made it worse: among commits, among versions of torch where these changed, both where both did; where
    nothing did, the one that shows it again. `step` are the words that judge a metric; without it the verdict is judged.
    """
    name, (old, new) = shlex.quote(scenario), changed.get("torch", ("", ""))
    versions = (
        f"dtprobe nightly --only {name} --torch {old},{new}"
        if step
        else f"dtprobe matrix bisect {name} --good {old} --bad {new}"
    )
    if commit_range:
        good, _, bad = commit_range.partition("..")
        commits = f"dtprobe history bisect {name} --good {good} --bad {bad}{step}"
        return f"{commits}  # torch changed too: {versions}" if old else commits
    return versions if old else f"dtprobe history step {name}{step}"


def gone_since(scenario: str, commit_range: str) -> str:
    """The command that lists the commits which touched a scenario that is no longer there, or what to look at."""
    folder = scenario.partition(":")[0]
    return f"git log --oneline {commit_range} -- {shlex.quote(f'*{folder}/*')}" if commit_range else "dtprobe list"
