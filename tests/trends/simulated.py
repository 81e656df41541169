"""Nights drawn from real runs: `data/runs.parquet` has 250 runs of all scenarios on one machine, quiet and loaded."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from dtprobe.store.rows import COLUMNS
from dtprobe.suite import ROUNDS, SUSPECTS
from dtprobe.trends import Regression, regressions, suspects

DATA = Path(__file__).with_name("data") / "runs.parquet"
DAY_NS = 86400 * 10**9
START_NS = 1_790_000_000 * 10**9

SCATTERING = ("s", "ratio", "Mbit/s", "cores", "times the median")
"""Units of what is never twice the same."""

Change = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
"""Of the rows of one run: what is planted."""


def unchanged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return rows


class InMemory:
    """What `Reading` gives, over rows in memory: the same queries by the same engine."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        import duckdb

        frame = pd.DataFrame(rows, columns=list(COLUMNS))
        for name, kind in COLUMNS.items():
            if kind in ("int64", "double"):
                frame[name] = pd.to_numeric(frame[name])
        self._connection = duckdb.connect()
        self._connection.register("history", frame)

    def sql(self, query: str, parameters: Any = ()) -> pd.DataFrame:
        return self._connection.execute(query, list(parameters)).df()


@dataclass
class Nights:
    """A history that grows by a night at a time, as the pipeline makes it: what is suspected is run again in the same night."""

    seed: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    count: int = 0
    _more: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        frame = pd.read_parquet(DATA)
        self._runs: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}
        for (scenario, variant, _), own in frame.groupby(["scenario", "variant", "run"], sort=True):
            self._runs.setdefault((scenario, variant), []).append(own.to_dict("records"))

    def _measured(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row again; what scatters lies anywhere in the run's own interval, since no time is measured twice."""
        again = dict(row)
        if row["unit"] in SCATTERING and row["low"] == row["low"] and row["high"] > row["low"]:
            again["value"] = self._rng.uniform(row["low"], row["high"])
        return again

    def _draw(self, key: tuple[str, str], number: int, common: dict[str, Any], change: Change) -> None:
        drawn = [self._measured(row) for row in self._rng.choice(self._runs[key])]
        name = f"{self.count:04d}-{':'.join(key)}-{number}"
        self.rows += [{**row, **common, "run": name} for row in change(drawn)]

    def passed(self, nights: int) -> None:
        """Unchanged nights that nobody looks at."""
        for _ in range(nights):
            self._grow(unchanged)

    def night(self, change: Change = unchanged, **common: Any) -> tuple[Regression, ...]:
        """What is found in a further night."""
        night, told = self._grow(change, **common)
        for most in ROUNDS:
            again = suspects(InMemory(self.rows), night)
            for name, lacks in list(again.items())[:SUSPECTS]:
                key = (name.partition(":")[0], name.partition(":")[2])
                for _ in range(min(lacks, most)):
                    self._more += 1
                    self._draw(key, self._more, {**told, "started_ns": told["started_ns"] + self._more}, change)
            if not again:
                break
        return regressions(InMemory(self.rows), night)

    def _grow(self, change: Change, **common: Any) -> tuple[str, dict[str, Any]]:
        self.count += 1
        night = f"night-{self.count:03d}"
        told = {
            "night": night,
            "started_ns": START_NS + self.count * DAY_NS,
            "host": "host",
            "git": "a" * 40,
            "kernel": "6.1",
            **common,
        }
        for key in self._runs:
            self._draw(key, 0, told, change)
        return night, told
