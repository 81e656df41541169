"""What became of the scenarios of a night: one row a run, and one row a scenario made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dtprobe.errors import UsageError
from dtprobe.suite.progress import Step
from dtprobe.suite.standing import Earlier, standing

SCHEMA = "dtprobe.suite/1"

ILL = ("not-as-expected", "broken", "failed", "not-run")
"""A night with one of these is not well; nor is one with a scenario that is flaky where it was not before."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What became of one scenario, or of one of its runs.

    `status` is `as-expected`, `not-as-expected`, `unsupported`, `failed` (the harness), `not-run` (an interrupt), `left-out` (the budget);
    of several runs of a scenario also `flaky` or `broken`, and `because` has the numbers.
    """

    scenario: str
    status: str
    verdict: str = ""
    expected: str | None = None
    mitigation: str = "none"
    because: str = ""
    took_s: float = 0.0
    folder: str = ""
    """The run folder, relative to `--out`; empty where there is none."""
    title: str = ""
    claim: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0
    """Which of the scenario's runs in this night; of a scenario's row the run that it shows."""
    seed: int | None = None
    host: str = ""
    attempts: int = 1
    """How often an engine began it, where a node vanished more than once."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the node that ran it, where an engine did."""
    new: bool = False
    """Whether a flaky or broken scenario was better before, or nothing is known of before."""
    runs: tuple[Mapping[str, Any], ...] = ()
    """Of a scenario that was run more than once, each run: number, seed, status, verdict, took_s, folder."""

    @property
    def step(self) -> Step:
        return self.scenario, self.number


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """All of them, in the order in which they were asked for."""

    folder: Path
    rows: tuple[Ran, ...]
    took_s: float
    interrupted: bool
    facts: Mapping[str, Any]

    def count(self, status: str) -> int:
        return sum(row.status == status for row in self.rows)

    @property
    def well(self) -> bool:
        """Something ran, nothing was other than expected or worse than before, and no regression was found."""
        ill = any(row.status in ILL or (row.status == "flaky" and row.new) for row in self.rows)
        good = self.count("as-expected") + self.count("flaky") > 0
        return good and not ill and not self.interrupted and not self.facts.get("regressions")

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **self.facts,
            "took_s": round(self.took_s, 3),
            "interrupted": self.interrupted,
            "well": self.well,
            "scenarios": [asdict(row) for row in self.rows],
        }


def merged(rows: Sequence[Ran], earlier: Earlier) -> Ran:
    """A scenario's row from those of its runs, at least one; the one that it shows is the first that was not as expected, else the first."""
    if len(rows) == 1:
        return rows[0]
    judged = [row for row in rows if row.status in ("as-expected", "not-as-expected", "failed")]
    shown = next((row for row in judged if row.status != "as-expected"), rows[0])
    if not judged:
        return rows[0]
    good = sum(row.status == "as-expected" for row in judged)
    found = standing(good, len(judged), earlier)
    told = ("number", "seed", "status", "verdict", "took_s", "folder")
    return replace(
        shown,
        status=found.status,
        new=found.new,
        because=f"{found.because}: {shown.because}" if found.status != "as-expected" else shown.because,
        took_s=round(sum(row.took_s for row in rows), 3),
        runs=tuple({name: getattr(row, name) for name in told} for row in rows),
    )


def load(path: Path) -> dict[str, Any]:
    """A summary.json, or that of a suite's folder. Raises UsageError for anything else."""
    file = path / "summary.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} is no summary of a suite: {error}", "name a folder below suites/") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise UsageError(f"{file} is no summary of a suite: its schema is not {SCHEMA}", "name a folder below suites/")
    return found
