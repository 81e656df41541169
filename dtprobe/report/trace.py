"""The run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open: collectives, system calls, GPU work, counters.

Format: "Trace Event Format" of the Chromium project, its JSON object form. Times are microseconds; each arm run begins at
zero, so that arms lie above each other and can be compared. A rank of an arm run is a process, what happened in it are threads.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from dtprobe.report import words
from dtprobe.report.load import RunFolder
from dtprobe.report.series import fired, starts
from dtprobe.report.timeline import last_dump

CALLS = 10_000
"""System calls kept of one arm run: the longest, and those that failed. More makes the viewers slow."""
ROWS = 200_000
"""Rows read of any other frame, for the same reason."""
COUNTERS = {"threads": "threads", "fds": "descriptors", "maps": "mappings", "rss_bytes": "resident bytes"}
LIFE_TID, COLLECTIVES_TID, EVENTS_TID, CALLS_TID, GPU_TID = 0, 1, 900, 1000, 500_000


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
    """The trace events of all arm runs; a process and a thread are named before their first event."""
    place = _Places(starts(folder))
    for (arm, repeat), start in starts(folder).items():
        run = folder.arm_run(arm, repeat) or {}
        first = None
        for member in run.get("ranks") or []:
            pid = place.process(arm, repeat, member.get("rank"))
            first = first or pid
            yield from place.thread(pid, LIFE_TID, "life")
            yield from _life(pid, member, start, run)
        if first is not None:
            yield from _marks(run, start, first)
    yield from _collectives(folder, place)
    yield from _reported(folder, place)
    yield from _calls(folder, place)
    yield from _gpu(folder, place)
    yield from _counters(folder, place)
    yield from _stacks(folder, place)


class _Places:
    """Where an event of a frame's row belongs: its process, and microseconds since its arm run began."""

    def __init__(self, began: Mapping[tuple[str, int], int]) -> None:
        self._began = began
        self._pids: dict[tuple[str, int, int | None], int] = {}
        self._names: dict[int, str] = {}
        self._threads: set[tuple[int, int]] = set()

    def process(self, arm: str, repeat: int, rank: int | None) -> int:
        """The process of a rank of an arm run; rank None is a command that started ranks of its own."""
        pid = self._pids.setdefault((arm, repeat, rank), len(self._pids) + 1)
        self._names[pid] = f"{arm}/{repeat} {'command' if rank is None else f'rank {rank}'}"
        return pid

    def rows(self, frame: pd.DataFrame) -> Iterator[tuple[int, int, Any]]:
        """(pid, zero in ns, row) of each row that belongs to a rank of an arm run and has a time."""
        for row in frame[frame["t_ns"].notna() & frame["rank"].notna() & frame["repeat"].notna()].itertuples():
            start = self._began.get((row.arm, int(row.repeat)))
            if start is not None:
                yield self.process(row.arm, int(row.repeat), int(row.rank)), start, row

    def thread(self, pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
        """The names of a thread and its process, the first time each is seen."""
        if pid in self._names and (pid, LIFE_TID) not in self._threads:
            self._threads.add((pid, LIFE_TID))
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": LIFE_TID, "args": {"name": self._names[pid]}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": LIFE_TID, "args": {"sort_index": pid}}
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": LIFE_TID, "args": {"name": "life"}}
        if (pid, tid) not in self._threads:
            self._threads.add((pid, tid))
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _life(pid: int, member: Mapping[str, Any], start: int, run: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    wall_s = member.get("wall_s")
    if wall_s is None and run.get("ended_ns"):
        wall_s = (run["ended_ns"] - start) / 1e9
    if wall_s is not None:
        ending = words.ending(member.get("exit_code"), member.get("signal"), member.get("timed_out"))
        args = {"pid": member.get("pid"), "cpu_s": member.get("cpu_s")}
        dur = round(float(wall_s) * 1e6, 3)
        yield {"ph": "X", "name": ending, "cat": "life", "ts": 0, "dur": dur, "pid": pid, "tid": LIFE_TID, "args": args}


def _marks(run: Mapping[str, Any], start: int, pid: int) -> Iterator[dict[str, Any]]:
    """What concerns all ranks of an arm run, on the first one's life: suspected hangs, and injections that fired."""
    common = {"pid": pid, "tid": LIFE_TID}
    for item in run.get("suspected") or []:
        if isinstance(item, dict) and item.get("t_ns") is not None:
            reason = words.clip(item.get("reason") or "", 400)
            ts = _us(item["t_ns"], start)
            yield common | {
                "ph": "i",
                "s": "p",
                "name": "hang suspected",
                "cat": "suspicion",
                "ts": ts,
                "args": {"reason": reason},
            }
    for fault, firing in fired(run):
        event = common | {"name": words.clip(fault, 80), "cat": "fault", "args": {"rank": firing.get("rank")}}
        ts = _us(firing["t_ns"], start)
        if firing.get("ended_ns"):
            yield event | {"ph": "X", "ts": ts, "dur": _us(firing["ended_ns"], firing["t_ns"])}
        else:
            yield event | {"ph": "i", "s": "p", "ts": ts}


def _collectives(folder: RunFolder, place: _Places) -> Iterator[dict[str, Any]]:
    frame = folder.frame(
        "collectives", "t_ns", "rank", "kind", "group", "op", "seq", "op_id", "state", "retired", "t_completed_ns", "sizes",
        "dtypes", "call_site", rows=ROWS,
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
    frame = folder.frame("events", "t_ns", "rank", "kind", "name", "fields", rows=ROWS)
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
        "gpu_ops", "t_ns", "rank", "tid", "kind", "name", "start_ns", "end_ns", "device", "stream", "bytes", rows=ROWS
    )
    for pid, zero, row in place.rows(frame[frame["start_ns"].notna() & frame["end_ns"].notna()]):
        on_gpu = not pd.isna(row.stream)
        tid = GPU_TID + (int(row.stream) % 1000 if on_gpu else 1000)
        yield from place.thread(pid, tid, f"GPU stream {int(row.stream)}" if on_gpu else "GPU runtime")
        yield {"ph": "X", "name": words.clip(row.name, 80), "cat": str(row.kind), "ts": _us(row.start_ns, zero),
               "dur": _us(row.end_ns, int(row.start_ns)), "pid": pid, "tid": tid, "args": _args(row, "device", "bytes")}  # fmt: skip


def _counters(folder: RunFolder, place: _Places) -> Iterator[dict[str, Any]]:
    frame = folder.frame("proc", "t_ns", "rank", *COUNTERS, rows=ROWS)
    before: dict[tuple[int, str], int] = {}
    for pid, zero, row in place.rows(frame):
        yield from place.thread(pid, LIFE_TID, "life")
        ts = _us(row.t_ns, zero)
        for column, name in COUNTERS.items():
            value = getattr(row, column)
            if not pd.isna(value) and before.get((pid, name)) != int(value):
                before[pid, name] = int(value)
                yield {"ph": "C", "name": name, "ts": ts, "pid": pid, "tid": LIFE_TID, "args": {name: int(value)}}


def _stacks(folder: RunFolder, place: _Places) -> Iterator[dict[str, Any]]:
    frame = folder.frame("stacks", "t_ns", "rank", "thread_name", "top", "frames", rows=ROWS)
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
