"""Standard output and error of a process, line by line, with the times at which the `logs` recorder saw the file grow."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl

from dtprobe.readers.artifact import Problems, ReaderError, as_int, json_lines, note, rank_of, read_bytes
from dtprobe.readers.schema import Schema

SCHEMA = Schema("log_lines", {"line": "Int64", "text": "string"})
"""`kind` is stdout or stderr, `line` counts from 1. `text` has no line end and no terminal colours; of a progress bar that
rewrote its line (`\\r`) only the last state is kept. `t_ns` is when the file was seen to have grown beyond the line's end: late
by up to the recorder's interval; null without a recorder."""

LIMIT = 256 << 20
"""Bytes of one log that are read; of a longer one the rest is left, and a problem says so."""
_COLOURS = r"\x1b\[[0-9;?]*[ -/]*[@-~]"


def read_logs(path: Path, rank: int | None = None, problems: Problems | None = None) -> pd.DataFrame:
    """A log as `log_lines`. `rank` defaults to the name's; `log-times.jsonl` beside it gives the times. Raises ReaderError."""
    kind = "stderr" if re.search(r"stderr|\.err$", path.name) else "stdout"
    data = read_bytes(path, LIMIT, problems)
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + 1
    if len(data) and (not len(ends) or ends[-1] != len(data)):
        ends = np.append(ends, len(data))
    text = pl.Series(data.decode("utf-8", "replace").split("\n")[: len(ends)], dtype=pl.String)
    text = text.str.strip_chars_end("\r").str.replace_all(_COLOURS, "").str.replace(r"(?s)^.*\r", "")
    return SCHEMA.frame(
        {
            "t_ns": _times(path, kind, ends, problems),
            "line": np.arange(1, len(ends) + 1),
            "text": text,
            "rank": rank if rank is not None else rank_of(path),
            "kind": kind,
            "source": str(path),
        }
    )


def _times(path: Path, kind: str, ends: np.ndarray, problems: Problems | None) -> pl.Series:
    """For each line the first time at which the log was at least as long as the line's end."""
    unknown = pl.Series([None], dtype=pl.Int64).new_from_index(0, len(ends))
    times = path.with_name("log-times.jsonl")
    if not times.is_file():
        return unknown
    try:
        lines = json_lines(times)
    except ReaderError as error:
        note(problems, times, "unreadable", str(error))
        return unknown
    seen = [
        (size, at)
        for one in lines
        if one.get("stream") == kind and (at := as_int(one.get("t_ns"))) and (size := as_int(one.get("size")))
    ]
    if not seen:
        return unknown
    sizes = np.maximum.accumulate([size for size, _ in seen])
    found = np.searchsorted(sizes, ends)
    moments = pl.Series([at for _, at in seen] + [None], dtype=pl.Int64)
    return moments.gather(found)
