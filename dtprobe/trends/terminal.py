"""Trends on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Column, Table

from dtprobe.errors import UsageError
from dtprobe.store import BrokenFile, Reading, history
from dtprobe.trends.series import change_points, rows, series

BARS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
WIDTH = 40


@dataclass(frozen=True, kw_only=True)
class Trend:
    """One metric of one arm on one host: the medians of its nights, oldest first, the version of torch in each, and the indices at which a
    new level begins.
    """

    metric: str
    arm: str
    unit: str
    host: str
    nights: tuple[str, ...]
    values: tuple[float, ...]
    torch: tuple[str, ...]
    changes: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


@contextmanager
def reading(out: Path, url: str | None = None) -> Iterator[tuple[Reading, Sequence[BrokenFile]]]:
    """The history of a folder of runs, or the one at the URL, closed at the end; raises UsageError where there is none."""
    read = history(out if url is None else url)
    try:
        if not read.broken and read.sql("SELECT 1 FROM history LIMIT 1").empty:
            raise UsageError(
                f"{out if url is None else url} has no history", "run a scenario first, or name another with --out or --history"
            )
        yield read, read.broken
    finally:
        read.close()


def complain(broken: Sequence[BrokenFile], to: TextIO) -> None:
    """A line for each file of the history that could not be read."""
    for one in broken:
        to.write(f"dtprobe: {one.path} is left out: {one.reason}\n")


def trends(read: Reading, scenario: str, metric: str | None) -> list[Trend]:
    """All metrics of a scenario, or one; raises UsageError where nothing was measured."""
    frame = rows(read)
    frame = frame[frame["scenario"].eq(scenario)]
    known = sorted(frame["metric"].unique())
    if metric is not None and metric not in known:
        raise UsageError(f"no metric {metric!r} of {scenario}", f"there are {', '.join(known)}" if known else "run it first")
    if not known:
        raise UsageError(f"the history has no measured value of {scenario}", "run it first")
    found = []
    for one in series(frame if metric is None else frame[frame["metric"].eq(metric)]):
        nights = one.nights
        values = tuple(float(value) for value in nights["value"])
        found.append(
            Trend(
                metric=one.metric,
                arm=one.arm,
                unit=one.unit,
                host=one.host,
                nights=tuple(nights["night"].astype(str)),
                values=values,
                torch=tuple(nights["torch"].astype(str)),
                changes=tuple(change_points(values)),
            )
        )
    return found


def spark(values: Sequence[float]) -> str:
    """A line of bars, the last WIDTH values from their least to their greatest."""
    last = values[-WIDTH:]
    low, high = min(last), max(last)
    if low == high:
        return BARS[4] * len(last)
    return "".join(BARS[1 + round((value - low) / (high - low) * (len(BARS) - 2))] for value in last)


def render_trends(trends: Sequence[Trend], console: Console) -> None:
    """A row a metric, arm and host; a host is named where there are several, a version of torch where a new level begins with it."""
    hosts = {one.host for one in trends}
    header = ("metric", "arm", *(["host"] if len(hosts) > 1 else []), "nights", "trend", "first", "last", "new level in")
    columns = [Column(name, no_wrap=name == "trend") for name in header]
    room = max(8, min(WIDTH, console.width // 5))
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for one in trends:
        first, last = (f"{value:.4g} {one.unit}" for value in (one.values[0], one.values[-1]))
        where = [one.host] if len(hosts) > 1 else []
        new = ", ".join(_new_level(one, at) for at in one.changes) or "-"
        table.add_row(one.metric, one.arm, *where, str(len(one.values)), spark(one.values[-room:]), first, last, new)
    console.print(table, highlight=False)


def _new_level(one: Trend, at: int) -> str:
    old, new = one.torch[at - 1], one.torch[at]
    return one.nights[at] + (f" (torch {old} -> {new})" if old != new else "")
