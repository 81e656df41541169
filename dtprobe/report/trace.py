"""The run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open: collectives, system calls, GPU work, counters.

Format: "Trace Event Format" of the Chromium project, its JSON object form. Times are microseconds; each arm run begins at
zero, so that arms lie above each other and can be compared. A rank of an arm run is a process, what happened in it are threads.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from dtprobe.report import words
from dtprobe.report.load import RunFolder
from dtprobe.report.series import starts
from dtprobe.report.timeline import last_dump

CALLS = 20_000
"""System calls kept of one arm run: the longest, and those that failed. More makes the viewers slow."""
COUNTERS = {"threads": "threads", "fds": "descriptors", "maps": "mappings", "rss_bytes": "resident bytes"}
COLLECTIVES_TID, EVENTS_TID, CALLS_TID, GPU_TID = 1, 900, 1000, 500_000


def write(folder: RunFolder, path: Path) -> Path:
    """Write the trace; an event a line, so that it can be cut, joined and compared with line tools."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","otherData":')
        file.write(
            json.dumps(
                {"scenario": str(folder.run.get("scenario")), "run": str(folder.run.get("id")), "zero": "start of each arm run"}
            )
        )
        file.write(',"traceEvents":[\n')
        for index, event in enumerate(events(folder)):
            file.write((",\n" if index else "") + json.dumps(event, separators=(",", ":"), allow_nan=False))
        file.write("\n]}\n")
    partial.replace(path)
    return path


def events(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """The trace events of all arm runs, metadata of a process before its events."""
    began = starts(folder)
    pids: dict[tuple[str, int, int], int] = {}
    for arm, repeat in began:
        run = folder.arm_run(arm, repeat) or {}
        for member in run.get("ranks") or []:
            if isinstance(member, dict) and member.get("rank") is not None:
                pids[(arm, repeat, int(member["rank"]))] = len(pids) + 1
                yield from _process(len(pids), arm, repeat, member, began[arm, repeat], run)
        for item in run.get("suspected") or []:
            if isinstance(item, dict) and item.get("t_ns") is not None:
                ts = _us(item["t_ns"], began[arm, repeat])
                first = next((pid for key, pid in pids.items() if key[:2] == (arm, repeat)), 0)
                yield {"ph": "i", "s": "p", "name": "hang suspected", "cat": "suspicion", "ts": ts, "pid": first, "tid": 0,
                       "args": {"reason": words.clip(item.get("reason") or "", 400)}}  # fmt: skip
    place = _Places(began, pids)
    yield from _collectives(folder, place)
    yield from _reported(folder, place)
    yield from _calls(folder, place)
    yield from _gpu(folder, place)
    yield from _counters(folder, place)
    yield from _stacks(folder, place)


class _Places:
    """Where an event of a frame's row belongs: its process, and microseconds since its arm run began."""

    def __init__(self, began: dict[tuple[str, int], int], pids: dict[tuple[str, int, int], int]) -> None:
        self._began = began
        self._pids = pids
        self._threads: dict[tuple[int, int], str] = {}

    def rows(self, frame: pd.DataFrame) -> Iterator[tuple[int, int, Any]]:
        """(pid, zero in ns, row) of each row that belongs to a rank of an arm run and has a time."""
        for row in frame[frame["t_ns"].notna() & frame["rank"].notna() & frame["repeat"].notna()].itertuples():
            pid = self._pids.get((row.arm, int(row.repeat), int(row.rank)))
            if pid is not None:
                yield pid, self._began[row.arm, int(row.repeat)], row

    def thread(self, pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
        """The name of a thread, the first time it is seen."""
        if (pid, tid) not in self._threads:
            self._threads[pid, tid] = name
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _process(pid: int, arm: str, repeat: int, member: dict, start: int, run: Any) -> Iterator[dict[str, Any]]:
    name = f"{arm}/{repeat} rank {member['rank']}"
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": 0, "args": {"name": "life"}}
    wall_s = member.get("wall_s")
    if wall_s is None and run.get("ended_ns"):
        wall_s = (run["ended_ns"] - start) / 1e9
    if wall_s is not None:
        ending = words.ending(member.get("exit_code"), member.get("signal"), member.get("timed_out"))
        yield {"ph": "X", "name": ending, "cat": "life", "ts": 0, "dur": round(float(wall_s) * 1e6, 3), "pid": pid, "tid": 0,
               "args": {"pid": member.get("pid"), "cpu_s": member.get("cpu_s")}}  # fmt: skip


def _collectives(folder: RunFolder, place: _Places) -> Iterator[dict[str, Any]]:
    frame = folder.frame(
        "collectives", "t_ns", "rank", "kind", "group", "op", "seq", "op_id", "state", "retired", "t_completed_ns", "sizes",
        "dtypes", "call_site",
    )  # fmt: skip
    groups = {group: COLLECTIVES_TID + index for index, group in enumerate(frame["group"].dropna().unique()[:800])}
    for pid, zero, row in place.rows(last_dump(frame)):
        tid = groups.get(row.group, COLLECTIVES_TID)
        yield from place.thread(pid, tid, f"group {words.clip(row.group, 60)}")
        known = not pd.isna(row.t_completed_ns)
        event = {
            "ph": "X",
            "name": words.clip(row.op, 60),
            "cat": "collective",
            "ts": _us(row.t_ns, zero),
            "pid": pid,
            "tid": tid,
        }
        if not row.done:
            event |= {"ph": "B", "name": f"{event['name']} (never completed)"}
        else:
            event["dur"] = max(_us(row.t_completed_ns, int(row.t_ns)), 0) if known else 0
        yield event | {"args": _args(row, "seq", "state", "sizes", "dtypes", "call_site")}


def _reported(folder: RunFolder, place: _Places) -> Iterator[dict[str, Any]]:
    """Events of the worker: a `duration_s` among the fields makes a span that ends at the event, else it is a moment."""
    frame = folder.frame("events", "t_ns", "rank", "kind", "name", "fields", rows=200_000)
    for pid, zero, row in place.rows(frame):
        yield from place.thread(pid, EVENTS_TID, "reported by the worker")
        fields = _fields(row.fields)
        name = words.clip(f"{row.kind} {row.name}" if isinstance(row.name, str) and row.name else row.kind, 80)
        ts = _us(row.t_ns, zero)
        event: dict[str, Any] = {"name": name, "cat": "event", "pid": pid, "tid": EVENTS_TID, "args": fields}
        duration = fields.get("duration_s")
        if isinstance(duration, int | float) and duration >= 0:
            yield event | {"ph": "X", "ts": round(ts - duration * 1e6, 3), "dur": round(duration * 1e6, 3)}
        else:
            yield event | {"ph": "i", "s": "t", "ts": ts}


def _calls(folder: RunFolder, place: _Places) -> Iterator[dict[str, Any]]:
    frame = folder.frame("syscalls", "t_ns", "rank", "tid", "kind", "name", "args", "result", "errno", "duration_s")
    kept = []
    for _, rows in frame.groupby(["arm", "repeat"], sort=False):
        if len(rows) > CALLS:
            weight = rows["duration_s"].fillna(0.0) + rows["errno"].notna().astype(float)
            rows = rows.loc[weight.nlargest(CALLS).index].sort_index()  # noqa: PLW2901
        kept.append(rows)
    for pid, zero, row in place.rows(pd.concat(kept) if kept else frame):
        tid = CALLS_TID + (0 if pd.isna(row.tid) else int(row.tid) % 400_000)
        yield from place.thread(pid, tid, "system calls" if pd.isna(row.tid) else f"system calls of thread {int(row.tid)}")
        event = {"name": words.clip(row.name if isinstance(row.name, str) else row.kind, 60), "cat": "syscall", "ts": _us(row.t_ns, zero),
                 "pid": pid, "tid": tid, "args": _args(row, "args", "result", "errno")}  # fmt: skip
        if pd.isna(row.duration_s):
            yield event | {"ph": "i", "s": "t"}
        else:
            yield event | {"ph": "X", "dur": round(float(row.duration_s) * 1e6, 3)}


def _gpu(folder: RunFolder, place: _Places) -> Iterator[dict[str, Any]]:
    frame = folder.frame(
        "gpu_ops", "t_ns", "rank", "tid", "kind", "name", "start_ns", "end_ns", "device", "stream", "bytes", rows=100_000
    )
    for pid, zero, row in place.rows(frame[frame["start_ns"].notna() & frame["end_ns"].notna()]):
        on_gpu = not pd.isna(row.stream)
        tid = GPU_TID + (int(row.stream) % 1000 if on_gpu else 1000)
        yield from place.thread(pid, tid, f"GPU stream {int(row.stream)}" if on_gpu else "GPU runtime")
        yield {"ph": "X", "name": words.clip(row.name, 80), "cat": str(row.kind), "ts": _us(row.start_ns, zero),
               "dur": _us(row.end_ns, int(row.start_ns)), "pid": pid, "tid": tid, "args": _args(row, "device", "bytes")}  # fmt: skip


def _counters(folder: RunFolder, place: _Places) -> Iterator[dict[str, Any]]:
    frame = folder.frame("proc", "t_ns", "rank", *COUNTERS, rows=100_000)
    for pid, zero, row in place.rows(frame):
        ts = _us(row.t_ns, zero)
        for column, name in COUNTERS.items():
            value = getattr(row, column)
            if not pd.isna(value):
                yield {"ph": "C", "name": name, "ts": ts, "pid": pid, "tid": 0, "args": {name: int(value)}}


def _stacks(folder: RunFolder, place: _Places) -> Iterator[dict[str, Any]]:
    frame = folder.frame("stacks", "t_ns", "rank", "thread_name", "top", "frames", rows=20_000)
    for pid, zero, row in place.rows(frame):
        yield from place.thread(pid, EVENTS_TID + 1, "stacks taken")
        yield {"ph": "i", "s": "t", "name": words.clip(row.top, 80), "cat": "stack", "ts": _us(row.t_ns, zero), "pid": pid,
               "tid": EVENTS_TID + 1, "args": _args(row, "thread_name", "frames")}  # fmt: skip


def _us(t_ns: Any, zero: int) -> float:
    return round((int(t_ns) - zero) / 1e3, 3)


def _args(row: Any, *names: str) -> dict[str, Any]:
    found = {}
    for name in names:
        value = getattr(row, name)
        if not pd.isna(value):
            found[name] = words.clip(value, 300) if isinstance(value, str) else int(value)
    return found


def _fields(text: Any) -> dict[str, Any]:
    try:
        found = json.loads(text) if isinstance(text, str) else {}
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        words.clip(key, 60): words.clip(value, 300) if isinstance(value, str) else _finite(value)
        for key, value in found.items()
    }


def _finite(value: Any) -> Any:
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return words.clip(value, 300)
