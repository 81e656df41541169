"""Nsight Systems profiles, exported to SQLite (`nsys export --type sqlite`)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd

from dtprobe.readers.artifact import Problems, ReaderError, as_int, as_text, note, opened, rank_of
from dtprobe.readers.schema import Schema

SCHEMA = Schema(
    "gpu_ops",
    {
        "name": "string",
        "start_ns": "Int64",
        "end_ns": "Int64",
        "duration_s": "Float64",
        "device": "Int64",
        "stream": "Int64",
        "bytes": "Int64",
    },
)
"""`kind` is kernel, memcpy, memset, runtime, osrt or nvtx. `start_ns` and `end_ns` count from the profile's start; `t_ns` is null
where the export does not say when that was (older versions). A range without end is a mark or was cut: `end_ns` null."""

MAX_ROWS = 5_000_000
MAX_STEPS = 2_000
"""Millions of SQLite instructions that reading may take: a hostile file can hold a query without end."""
_TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernel",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "memset",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "runtime",
    "OSRT_API": "osrt",
    "NVTX_EVENTS": "nvtx",
}
_NAMES = ("textId", "nameId", "demangledName", "shortName", "mangledName")
_WANTED = ("start", '"end"', "globalTid", "globalPid", "deviceId", "streamId", "bytes", "copyKind", "text", *_NAMES)
_COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
"""CUpti_ActivityMemcpyKind of NVIDIA's CUPTI documentation."""


def read_nsys(path: Path, rank: int | None = None, problems: Problems | None = None) -> pd.DataFrame:
    """The kernels, copies, CUDA and system calls and NVTX ranges of an export, in order of their starts, as `gpu_ops`.

    Tables and columns differ between versions of nsys: those that are there are read. `rank` defaults to the name's.
    Raises ReaderError for what is no SQLite file or has none of the tables.
    """
    with opened(path) as file:
        if file.read(16) != b"SQLite format 3\0":
            raise ReaderError(f"{path} is not an SQLite file", "nsys export --type sqlite REPORT")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as base:
            return _read(base, path, rank, problems)
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        raise ReaderError(f"cannot read {path} as an nsys export: {error}", "export it again") from error


def _read(base: sqlite3.Connection, path: Path, rank: int | None, problems: Problems | None) -> pd.DataFrame:
    left = MAX_STEPS

    def over() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    base.set_progress_handler(over, 1_000_000)
    base.text_factory = lambda raw: raw.decode("utf-8", "replace")
    base.execute("PRAGMA trusted_schema=OFF")
    tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    present = [table for table in _TABLES if table in tables]
    if not present:
        raise ReaderError(f"{path} is an SQLite file without nsys tables", "export a profile with -t cuda,nvtx,osrt")
    names = dict(base.execute("SELECT id, value FROM StringIds LIMIT ?", (MAX_ROWS,))) if "StringIds" in tables else {}
    began = None
    if "TARGET_INFO_SESSION_START_TIME" in tables and "utcEpochNs" in _columns(base, "TARGET_INFO_SESSION_START_TIME"):
        began = next(
            (as_int(value) for (value,) in base.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")), None
        )
    rows: list[dict[str, Any]] = []
    for table in present:
        rows += _rows(base, table, names, began)
        if len(rows) >= MAX_ROWS:
            note(problems, path, "cut", f"only the first {MAX_ROWS} rows of each table were read")
    rows.sort(key=lambda row: (row["start_ns"] is None, row["start_ns"] or 0))
    columns = ("t_ns", "pid", "tid", "kind", *SCHEMA.own)
    whose = rank if rank is not None else rank_of(path)
    return SCHEMA.frame({**{name: [row.get(name) for row in rows] for name in columns}, "rank": whose, "source": str(path)})


def _columns(base: sqlite3.Connection, table: str) -> set[str]:
    return {name for (name,) in base.execute("SELECT name FROM pragma_table_info(?)", (table,))}


def _rows(base: sqlite3.Connection, table: str, names: dict[Any, Any], began: int | None) -> Iterator[dict[str, Any]]:
    known = _columns(base, table)
    columns = [name for name in _WANTED if name.strip('"') in known]
    if not columns:
        return
    chosen = ", ".join(columns)  # of a fixed list, like the table: no text of the file's is in the query
    query = f"SELECT {chosen} FROM {table} LIMIT {MAX_ROWS}"
    for values in base.execute(query):
        row = dict(zip((name.strip('"') for name in columns), values, strict=True))
        start, end = as_int(row.get("start")), as_int(row.get("end"))
        thread = as_int(row.get("globalTid", row.get("globalPid")))
        yield {
            "t_ns": as_int(began + start) if began is not None and start is not None else None,
            # nsys's documentation: 24 bits of thread, 24 bits of process, then host and VM
            "pid": (thread >> 24) & 0xFFFFFF if thread is not None else None,
            "tid": thread & 0xFFFFFF if thread is not None and "globalTid" in row else None,
            "kind": _TABLES[table],
            "name": _name(row, names),
            "start_ns": start,
            "end_ns": end,
            "duration_s": (end - start) / 1e9 if start is not None and end is not None else None,
            "device": as_int(row.get("deviceId")),
            "stream": as_int(row.get("streamId")),
            "bytes": as_int(row.get("bytes")),
        }


def _name(row: dict[str, Any], names: dict[Any, Any]) -> str | None:
    if "copyKind" in row:
        return _COPIES.get(row["copyKind"], f"kind {row['copyKind']}")
    written = as_text(row.get("text"))
    if written is not None:
        return written
    keys = (row.get(key) for key in _NAMES)
    return next((text for key in keys if (text := as_text(names.get(key) if isinstance(key, int) else key)) is not None), None)
