"""A commit is good or bad by one run of a scenario: what `git bisect run` asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GOOD, BAD, UNKNOWN = 0, 1, 125
"""`git bisect run` takes 125 for a commit that cannot be tested (its manual)."""


def judged(
    verdict: Mapping[str, Any], metric: str | None, arm: str, *, above: float | None = None, below: float | None = None
) -> tuple[int, str]:
    """The exit code and why, from a `verdict.json`: by the metric where one is named, else by the verdict against the pinned one."""
    said = f"{verdict['verdict']}, expected {verdict['expected']}"
    if verdict["verdict"] in ("unsupported", "error", "inconclusive"):
        return UNKNOWN, f"{said}: {verdict['because']}"
    if metric is None:
        return (GOOD if verdict["as_expected"] else BAD), said
    value = (verdict["metrics"].get(metric) or {}).get(arm)
    if value is None:
        return UNKNOWN, f"no {metric} of the {arm} arm was measured"
    bad = value > above if above is not None else value < (below if below is not None else value)
    return (BAD if bad else GOOD), f"{metric} of the {arm} arm is {value:g}, {'bad' if bad else 'good'}"
