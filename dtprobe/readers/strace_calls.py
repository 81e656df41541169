"""What spans the lines of a strace text: times, pids, the halves of a call, noise. State goes from piece to piece of the file."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path

import numpy as np
import polars as pl

from dtprobe.errors import UsageError
from dtprobe.readers.artifact import Problems, ReaderError, note, one_line
from dtprobe.readers.strace_lines import CALL, CUT, EXIT, NOISE, QUIET, RESUMED, UNFINISHED, Part

_DAY_NS = 86_400 * 10**9
_ENDS = ("result", "errno", "duration_s")


class Noise:
    """Takes out what is no event, counts it, and keeps the last line back while it may be a cut one."""

    def __init__(self) -> None:
        self.lines = 0
        self.events = 0
        self._noise = 0
        self._first = ""
        self._cut: pl.DataFrame | None = None

    def removed(self, rows: pl.DataFrame, part: Part) -> pl.DataFrame:
        """The events among a piece's rows."""
        if self._cut is not None:
            self._count(self._cut, "a call without result")
        last = rows["line"].max()
        self.lines += len(rows)
        # only the file's last line may be cut; elsewhere a call without result is something else that looks like one
        ends = pl.col("what") == CUT
        odd = rows.filter((pl.col("what") == NOISE) | (ends & (pl.col("line") != last)))
        if len(odd):
            self._count(odd, part.line(odd["line"][0] - rows["line"][0]).decode())
        self._cut = rows.filter(ends & (pl.col("line") == last))
        self._cut = self._cut if len(self._cut) else None
        kept = rows.filter(~pl.col("what").is_in([NOISE, QUIET, CUT]))
        self.events += len(kept)
        return kept

    def cut(self) -> pl.DataFrame | None:
        """The file's last line, where it is a call's beginning."""
        return self._cut

    def say(self, path: Path, problems: Problems | None) -> None:
        """Raises ReaderError where there were lines and none was an event; else notes what was noise, cut or empty."""
        if not self.lines:
            note(problems, path, "incomplete", "the file is empty")
        if self._noise and not self.events:
            raise ReaderError(f"{path} is not strace output: none of its {self.lines} lines is", f"first, {self._first}")
        if self._noise:
            note(problems, path, "noise", f"{self._noise} of {self.lines} lines are not strace's; first, {self._first}")
        if self._cut is not None:
            note(problems, path, "cut", f"line {self.lines}, the last, is cut")

    def _count(self, odd: pl.DataFrame, text: str) -> None:
        self._first = self._first or f"line {odd['line'][0]}: {one_line(text.strip(), 80)}"
        self._noise += len(odd)


class Clock:
    """Turns the times that the lines carry into `t_ns` (UTC) and `since_first_s`."""

    def __init__(self, day: dt.datetime | None) -> None:
        self._midnight: int | None = None
        if day is not None and day.tzinfo is None:
            raise UsageError(f"day={day} has no time zone", "give an aware datetime: strace prints local times")
        if day is not None:
            self._midnight = (day - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1) * 1000
        self._first: int | None = None
        self._last: int | None = None
        self._days = 0
        self._elapsed: float | None = None
        self._of_day = False
        self._absolute = False

    def told(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The rows, in the file's order, with `t_ns` and `since_first_s` for `time_ns`, `clock` and `delta_s`."""
        time, since = rows["time_ns"], pl.Series([None], dtype=pl.Float64).new_from_index(0, len(rows))
        known = time
        if time.null_count() < len(rows):
            self._absolute = True
            self._of_day = self._of_day or bool((rows["clock"] & time.is_not_null()).any())
            if self._of_day:
                time = self._unrolled(time)
                known = time + self._midnight if self._midnight is not None else time.clear(len(rows))
            if self._first is None:
                self._first = time.drop_nulls()[0]
            since = (time - self._first) / 1e9
        elif rows["delta_s"].null_count() < len(rows):
            # the first line's own delta is the time since nothing
            start = -rows["delta_s"].drop_nulls()[0] if self._elapsed is None else self._elapsed
            since = rows["delta_s"].fill_null(0).cum_sum() + start
            self._elapsed = since[-1]
        return rows.drop("time_ns", "clock", "delta_s").with_columns(t_ns=known, since_first_s=since)

    def _unrolled(self, time: pl.Series) -> pl.Series:
        """Times of day plus the days that passed since the first: a jump back by more than half a day is a midnight."""
        before = pl.Series([self._last], dtype=pl.Int64)
        whole = pl.concat([before, time.rename("")]).forward_fill()
        days = (whole.diff() < -_DAY_NS // 2).fill_null(False).cast(pl.Int64).cum_sum()[1:] + self._days
        self._last, self._days = whole[-1], days[-1]
        return time + days * _DAY_NS

    def say(self, path: Path, problems: Problems | None) -> None:
        """Note why `t_ns` is null, where the lines do carry times."""
        if self._of_day and self._midnight is None:
            note(problems, path, "clock", "times of day without a date: t_ns is null, give the day to have it")
        elif self._elapsed is not None and not self._absolute:
            note(problems, path, "clock", "relative times only: t_ns is null")


class Pids:
    """Pids for lines that have none: from the name of a `-ff` file, or by what was resumed under a pid.

    On a terminal strace puts no pid before the lines of a process that it traces alone.
    """

    def __init__(self, path: Path) -> None:
        named = re.search(r"\.([0-9]{1,7})$", path.name)
        self._named = int(named[1]) if named else None
        self._seen = False
        self._gone = False
        self._open: dict[int | None, str] = {}
        self.alone: int | None = None
        """The process that was traced alone at first, once that is known."""

    def filled(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The rows with the pids that are known by now."""
        unknown = rows["tid"].null_count()
        self._seen = self._seen or unknown < len(rows)
        if unknown and not self._seen:
            self.alone = self._named
        if not self._seen or not (unknown or None in self._open):
            return rows.with_columns(pl.col("tid").fill_null(self.alone)) if self.alone is not None else rows
        if self.alone is None:
            self._match(rows)
        if self.alone is None or self._gone:
            return rows
        ends = rows["line"].filter((rows["tid"] == self.alone).fill_null(False) & (rows["what"] == EXIT)).min()
        self._gone = ends is not None
        alive = pl.lit(True) if ends is None else pl.col("line") < ends
        return rows.with_columns(pl.when(pl.col("tid").is_null() & alive).then(self.alone).otherwise("tid").alias("tid"))

    def _match(self, rows: pl.DataFrame) -> None:
        """A call that began without pid and ended under one, or the other way round, is that process's."""
        halves = rows.filter(pl.col("what").is_in([UNFINISHED, RESUMED])).select("tid", "name", "what")
        for tid, name, what in halves.iter_rows():
            if what == UNFINISHED:
                self._open[tid] = name
            elif self._open.pop(tid, None) != name:
                others = [other for other, opened in self._open.items() if opened == name]
                found = tid if tid is not None and None in others else others[0] if tid is None and len(others) == 1 else None
                if found is not None:
                    self.alone = found
                    return


def joined(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The rows with each resumed half moved into its unfinished one, and apart those that wait for theirs."""
    what = rows["what"].to_numpy()
    places = np.flatnonzero((what == UNFINISHED) | (what == RESUMED))
    if not len(places):
        return rows, rows.clear()
    tids = rows["tid"].fill_null(-1).to_numpy()[places]
    order = np.argsort(tids, kind="stable")
    places, tids = places[order], tids[order]
    begins = what[places] == UNFINISHED
    names = rows["name"].gather(places)
    same = (tids[1:] == tids[:-1]) & begins[:-1] & ~begins[1:] & (names[1:] == names[:-1]).to_numpy()
    first, second = places[:-1][same], places[1:][same]
    waiting = places[begins & np.append(tids[1:] != tids[:-1], True)]

    # each column's values, and behind them what the joined rows get: one index picks both
    pick = np.arange(len(rows))
    pick[first] = second
    whole = rows["args"].gather(first) + rows["args"].gather(second).str.strip_chars_start(" ")
    pick_args = np.arange(len(rows))
    pick_args[first] = len(rows) + np.arange(len(first))
    what = what.copy()
    what[first] = CALL
    full = rows.with_columns(
        pl.concat([rows["args"], whole]).gather(pick_args),
        *(rows[name].gather(pick) for name in _ENDS),
        pl.Series("what", what),
    )
    kept = np.ones(len(rows), bool)
    kept[second] = kept[waiting] = False
    return full.filter(kept), rows[np.sort(waiting)]
