"""nsys exports, from a synthetic sample: nsys itself is too heavy to be here."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from dtprobe.readers import nsys
from dtprobe.readers.artifact import ReaderError
from dtprobe.readers.nsys import SCHEMA, read_nsys

PID, TID = 4321, 4322
GLOBAL_TID = (1 << 48) | (PID << 24) | TID
BEGAN_NS = 1_790_000_000_000_000_000

TABLES = {
    "StringIds": "id INTEGER, value TEXT",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": 'start INTEGER, "end" INTEGER, deviceId INTEGER, streamId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER',
    "CUPTI_ACTIVITY_KIND_MEMCPY": 'start INTEGER, "end" INTEGER, deviceId INTEGER, streamId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER',
    "CUPTI_ACTIVITY_KIND_RUNTIME": 'start INTEGER, "end" INTEGER, globalTid INTEGER, nameId INTEGER, returnValue INTEGER',
    "OSRT_API": 'start INTEGER, "end" INTEGER, globalTid INTEGER, nameId INTEGER',
    "NVTX_EVENTS": 'start INTEGER, "end" INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER',
}
ROWS: dict[str, list[tuple]] = {
    "StringIds": [(1, "cudaLaunchKernel"), (2, "void gemm<float>(int)"), (3, "gemm"), (4, "poll"), (5, "backward")],
    "TARGET_INFO_SESSION_START_TIME": [(BEGAN_NS, "", "")],
    "CUPTI_ACTIVITY_KIND_KERNEL": [(300, 900, 0, 7, GLOBAL_TID & ~0xFFFFFF, 2, 3)],
    "CUPTI_ACTIVITY_KIND_MEMCPY": [(100, 200, 0, 7, GLOBAL_TID & ~0xFFFFFF, 4096, 1)],
    "CUPTI_ACTIVITY_KIND_RUNTIME": [(50, 60, GLOBAL_TID, 1, 0)],
    "OSRT_API": [(400, 5400, GLOBAL_TID, 4)],
    "NVTX_EVENTS": [(10, 1000, 59, "forward", None, GLOBAL_TID), (20, None, 34, None, 5, GLOBAL_TID)],
}


def write(path: Path, tables: dict[str, str] = TABLES, rows: dict[str, list[tuple]] = ROWS) -> Path:
    """A synthetic export: made after the documented tables, not by nsys."""
    base = sqlite3.connect(path)
    for table, columns in tables.items():
        base.execute(f"CREATE TABLE {table} ({columns})")
        for row in rows.get(table, []):
            base.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(row))})", row)
    base.commit()
    base.close()
    return path


def test_every_kind_is_read_in_order_of_its_start(tmp_path: Path) -> None:
    frame = SCHEMA.check(read_nsys(write(tmp_path / "synthetic-rank2.sqlite")))
    assert frame[["kind", "name"]].values.tolist() == [
        ["nvtx", "forward"],
        ["nvtx", "backward"],
        ["runtime", "cudaLaunchKernel"],
        ["memcpy", "HtoD"],
        ["kernel", "void gemm<float>(int)"],
        ["osrt", "poll"],
    ]
    assert set(frame["rank"]) == {2} and set(frame["pid"]) == {PID}
    assert frame["t_ns"].tolist() == [BEGAN_NS + start for start in frame["start_ns"]]
    assert frame["duration_s"].iloc[-1] == 5e-6
    copy, kernel = frame.iloc[3], frame.iloc[4]
    assert (copy["bytes"], copy["device"], copy["stream"]) == (4096, 0, 7)
    assert kernel[["tid"]].isna().all() and frame["tid"].dropna().unique().tolist() == [TID]
    assert frame["end_ns"].isna().tolist() == [False, True, False, False, False, False]


def test_a_version_with_fewer_tables_and_columns_gives_what_it_has(tmp_path: Path) -> None:
    tables = {"OSRT_API": 'start INTEGER, "end" INTEGER, nameId INTEGER', "OTHER": "x INTEGER"}
    frame = read_nsys(write(tmp_path / "synthetic.sqlite", tables, {"OSRT_API": [(1, 5, 9), ("odd", None, None)]}))
    assert frame["start_ns"].fillna(-1).tolist() == [1, -1]
    assert frame[["t_ns", "pid", "tid", "name", "rank"]].isna().all(axis=None)


def test_other_files_are_one_clear_line(tmp_path: Path) -> None:
    text = tmp_path / "a.sqlite"
    text.write_text("no")
    with pytest.raises(ReaderError, match="not an SQLite file"):
        read_nsys(text)
    with pytest.raises(ReaderError, match="without nsys tables"):
        read_nsys(write(tmp_path / "b.sqlite", {"T": "x INTEGER"}))
    whole = write(tmp_path / "c.sqlite").read_bytes()
    text.write_bytes(whole[: len(whole) // 3])
    with pytest.raises(ReaderError, match="as an nsys export"):
        read_nsys(text)


def test_a_view_in_a_tables_place_is_not_asked_and_a_query_without_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "synthetic.sqlite")
    endless = "WITH RECURSIVE r(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM r) SELECT start FROM r"
    with sqlite3.connect(path) as base:
        base.execute("DROP TABLE OSRT_API")
        base.execute(f"CREATE VIEW OSRT_API AS {endless}")
    assert "osrt" not in set(read_nsys(path)["kind"])
    monkeypatch.setattr(nsys, "MAX_STEPS", 0)
    with sqlite3.connect(path) as base:
        base.executemany("INSERT INTO StringIds VALUES (?, 'x')", [(at,) for at in range(10, 400_000)])
    with pytest.raises(ReaderError, match="interrupted"):
        read_nsys(path)
