"""strace's text output, in any of its forms, as one row a call, signal or exit."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa

from dtprobe.readers import strace_lines
from dtprobe.readers.artifact import Problems, opened, rank_of
from dtprobe.readers.schema import Schema
from dtprobe.readers.strace_calls import Clock, Noise, Pids, joined
from dtprobe.readers.strace_lines import CALL, EXIT, SIGNAL

SCHEMA = Schema(
    "syscalls",
    {
        "line": "Int64",
        "name": "string",
        "args": "string",
        "result": "string",
        "errno": "string",
        "duration_s": "Float64",
        "path": "string",
        "complete": "boolean",
        "since_first_s": "Float64",
    },
)
"""`kind` is syscall, signal or exit. `tid` is the number that strace prints, `pid` its process as far as the traced clone
calls tell. `line` is where the call begins. `result` is null where strace prints `?`. `complete` is false for a call whose
return is not in the file: it was still running at the end, or its process died in it. `path` is the first quoted path, or
the `-y` path of the descriptor. `since_first_s` is the time since the file's first line."""

_QUOTED = r'^[^"]*"((?:[^"\\]|\\.)*)"'
_FD = r"[0-9]+<((?:[^<>-]|->|-[^<>])*)>"
_SUN_PATH = r'sun_path=@?"((?:[^"\\]|\\.)*)"'
_TAKES_NAME = r"^(?:[a-z_]*at2?|statx)$"
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"v": b"\v", b"f": b"\f"}


def read_strace(
    path: Path, rank: int | None = None, *, day: dt.datetime | None = None, problems: Problems | None = None
) -> pd.DataFrame:
    """One strace text file as `syscalls`, in order of the calls' beginnings.

    Reads `-f`, `-ff`, `-t`, `-tt`, `-ttt`, `-r`, `-T`, `-y`, `-yy`, `-Y`, `-i`, `-n` and their combinations; unfinished and
    resumed halves are joined. With `-t` or `-tt` strace prints a local time of day, so `t_ns` is null unless `day`, the
    midnight before the first line as an aware datetime, is given; days that pass within the file are counted. `rank`
    defaults to what the name says; the last number of a `-ff` file's name is the pid.

    Raises ReaderError for a file that cannot be opened or holds no line of strace's; lesser flaws go to `problems`.
    """
    clock, pids, noise = Clock(day), Pids(path), Noise()
    pieces: list[pa.Table] = []
    starts: list[int] = []
    late: list[pl.DataFrame] = []
    held = last = shape = None
    with opened(path) as file:
        for part in strace_lines.parts(file):
            shape = shape or strace_lines.form(part)
            first = noise.lines + 1
            rows = strace_lines.split(part, shape).with_row_index("line", offset=first)
            rows = clock.told(noise.removed(rows, part))
            done, held = joined(pids.filled(rows if held is None else pl.concat([held, rows])))
            held = _compact(held)
            if last is not None:  # most calls that were open end in the next piece: only few are later
                back = done.filter(pl.col("line").is_between(starts[-1], first, closed="left"))
                pieces.append(_finished(pl.concat([last, back]).sort("line") if len(back) else last))
                late.append(_compact(done.filter(pl.col("line") < starts[-1])))
            starts.append(first)
            last = done.filter(pl.col("line") >= first)
    noise.say(path, problems)
    clock.say(path, problems)
    if held is None or last is None:
        return SCHEMA.empty()
    pieces.append(_finished(last))
    cut = noise.cut()
    late += [held] if cut is None else [held, clock.told(cut)]
    del part, rows, done, last
    _sort_in(pieces, starts, _finished(pl.concat(late)))
    table = pa.concat_tables(pieces)
    tids = pl.Series("tid", table["tid"])
    if pids.alone is not None:
        tids = pl.select(pl.when(tids.is_null().rle_id() == 0).then(tids.fill_null(pids.alone)).otherwise(tids)).to_series()
    processes = _processes(table)
    columns: dict[str, Any] = {name: table[name] for name in table.column_names}
    columns["pid"] = tids.replace(list(processes), list(processes.values()))
    columns |= {"tid": tids, "rank": rank if rank is not None else rank_of(path), "source": str(path)}
    return SCHEMA.frame(columns)


def _finished(rows: pl.DataFrame) -> pa.Table:
    """The frame's columns of joined rows."""
    returned = (pl.col("what") == CALL) & ((pl.col("result") != "?") | pl.col("errno").is_not_null())
    columns = rows.select(
        "t_ns",
        pl.col("tid").cast(pl.Int64),
        pl.col("what")
        .replace_strict({SIGNAL: "signal", EXIT: "exit"}, default="syscall", return_dtype=pl.String)
        .alias("kind"),
        pl.col("line").cast(pl.Int64),
        "name",
        pl.col("args").str.strip_suffix(" <unfinished ...>").str.strip_chars_end(", "),
        pl.when(pl.col("result") != "?").then("result").alias("result"),
        "errno",
        "duration_s",
        (returned.fill_null(False) | pl.col("what").is_in([SIGNAL, EXIT])).alias("complete"),
        "since_first_s",
    )
    return _unescaped(columns.with_columns(_paths(columns))).to_arrow(compat_level=pl.CompatLevel.oldest())


def _compact(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows without the text of the piece that they were found in, which polars' strings would keep alive."""
    return pl.DataFrame(pl.from_arrow(rows.to_arrow(compat_level=pl.CompatLevel.oldest()))) if len(rows) else rows.clear()


def _sort_in(pieces: list[pa.Table], starts: list[int], late: pa.Table) -> None:
    """Put calls that ended in a later piece than they began in where they began."""
    lines = late["line"].to_numpy()
    for at, (start, end) in enumerate(zip(starts, [*starts[1:], 2**62], strict=True)):
        here = np.flatnonzero((lines >= start) & (lines < end))
        if len(here):
            pieces[at] = pa.concat_tables([pieces[at], late.take(here)]).sort_by("line")


def _processes(table: pa.Table) -> dict[int, int]:
    """Thread -> process, for the threads whose clone call was traced."""
    made: dict[int, int] = {}
    calls = pl.DataFrame([pl.Series(name, table[name]) for name in ("tid", "name", "args", "result")])
    calls = calls.filter(pl.col("name").is_in(["clone", "clone3"]) & pl.col("args").str.contains("CLONE_THREAD", literal=True))
    for tid, _, _, result in calls.drop_nulls().iter_rows():
        if result.isdigit() and len(result) < 10:
            made[int(result)] = made.get(tid, tid)
    return made


def _paths(columns: pl.DataFrame) -> pl.Series:
    """`path`: each expression is tried only where a cheaper look says that it may match."""
    args, names = columns["args"], columns["name"]
    call = (columns["kind"] == "syscall").to_numpy()
    quoted = call & args.str.contains('"', literal=True).to_numpy()
    bracket = call & args.str.contains("<", literal=True).to_numpy()
    on_fd = args.str.contains(r"^[0-9]+(?:$|[<,])").to_numpy() & ~names.str.contains(_TAKES_NAME).to_numpy()
    at_socket = names.is_in(["connect", "bind"]).to_numpy()
    pick = np.zeros(len(columns), np.int64)
    found = [pl.Series([None], dtype=pl.String)]
    tries = (
        (_SUN_PATH, quoted & on_fd & at_socket),
        ("^" + _FD, bracket & on_fd),
        (_QUOTED, quoted & ~on_fd),
        (_FD, bracket & ~on_fd),
    )
    for expression, where in tries:
        rows = np.flatnonzero(where & (pick == 0))
        if len(rows):
            texts = args.gather(rows).str.extract(expression)
            some = texts.is_not_null().to_numpy()
            pick[rows[some]] = sum(map(len, found)) + np.flatnonzero(some)
            found.append(texts.rename(""))
    return pl.concat(found).gather(pick).rename("path")


def _unescaped(columns: pl.DataFrame) -> pl.DataFrame:
    """Paths as they are: strace writes bytes beyond ASCII, quotes and brackets as escapes."""
    escaped = columns["path"].drop_nulls().unique()
    escaped = escaped.filter(escaped.str.contains("\\", literal=True))
    if not len(escaped):
        return columns
    plain = [_unescape(one) for one in escaped]
    return columns.with_columns(pl.col("path").replace(escaped, pl.Series(plain, dtype=pl.String)))


def _unescape(text: str) -> str:
    def byte(match: re.Match[bytes]) -> bytes:
        octal, hexadecimal, letter = match.groups()
        if octal or hexadecimal:
            return bytes([int(octal, 8) & 0xFF if octal else int(hexadecimal, 16)])
        return _LETTERS.get(letter, letter)

    return _ESCAPE.sub(byte, text.encode()).decode("utf-8", "replace")
