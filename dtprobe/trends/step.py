"""A commit is good or bad by one run of a scenario: what `git bisect run` asks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtprobe.errors import UsageError
from dtprobe.trends import bisect

GOOD, BAD, UNKNOWN = 0, 1, 125
"""`git bisect run` takes 125 for a commit that cannot be tested (its manual)."""


def check(metric: str | None, above: float | None, below: float | None) -> None:
    """Raises UsageError for bounds without a metric, a metric without a bound, and two bounds."""
    if (metric is None) != (above is None and below is None) or (above is not None and below is not None):
        raise UsageError("--metric goes with one of --above and --below", "give both, or neither to judge by the verdict")


def ran(tree: Path, scenario: str, paths: Sequence[Path], environ: Mapping[str, str]) -> Mapping[str, Any] | str:
    """The `verdict.json` of a run of the scenario as the tree has it, or why there is none. The run is in no history and leaves no folder.

    Content folders (`paths`) that lie in the tree's repository are those of the tree, so they are given relative to its top.
    """
    with tempfile.TemporaryDirectory(prefix="dtprobe-step-") as out:
        words = ["run", scenario, "--json", "--out", out]
        for path in paths:
            words += ["--path", str(path)]
        said, last = bisect.in_tree(tree, words, environ)
    try:
        verdict = json.loads(said)
    except ValueError:
        return last
    return verdict if isinstance(verdict, dict) else last


def judged(
    verdict: Mapping[str, Any] | str, metric: str | None, arm: str, *, above: float | None = None, below: float | None = None
) -> tuple[int, str]:
    """The exit code and why, from a `verdict.json`: by the metric where one is named, else by the verdict against the pinned one."""
    if isinstance(verdict, str):
        return UNKNOWN, f"no verdict: {verdict}"
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
