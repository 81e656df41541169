"""The timeline as a Chrome trace, which ui.perfetto.dev opens: a process a rank, its operations, its moments, arrows for the waits.

Format: "Trace Event Format" of the Chromium project, its JSON object form, as the trace of a run. Times are microseconds after the
first thing that has a time; where nothing has one, moments stand a millisecond apart in their order, and the head says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from dtprobe.diagnose.diagnosis import Diagnosis, Operation
from dtprobe.report import words

MOMENTS_TID, WAITS_TID, GROUPS_TID = 1, 2, 10
ARROWS = 20_000
"""Arrows at most; viewers become slow with more. The waits beyond are counted in the head."""
JOB_PID = 1
RANK_PID = 1000
HOST_PID = 2
STEP_NS = 1_000_000


def render(diagnosis: Diagnosis) -> str:
    """The document; an event a line, so that it can be cut, joined and compared with line tools."""
    clock = _Clock(diagnosis)
    head = {
        "failure_mode": words.clip(diagnosis.failure_mode, 80),
        "zero": clock.zero,
        "zero_utc_ns": clock.zero_ns,
        "waits_without_arrow": max(0, len(diagnosis.waits) - ARROWS),
    }
    lines = [json.dumps(event, separators=(",", ":"), allow_nan=False) for event in events(diagnosis)]
    body = ",\n".join(lines)
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(head)},"traceEvents":[\n{body}\n]}}\n'


def events(diagnosis: Diagnosis) -> Iterator[dict[str, Any]]:
    """The trace events; a process and a thread are named before their first event."""
    clock, tracks = _Clock(diagnosis), _Tracks(diagnosis)
    for order, moment in enumerate(diagnosis.timeline):
        pid = tracks.pid(moment.rank, moment.host)
        yield from tracks.names(pid, MOMENTS_TID, "moments")
        args = {
            "text": words.clip(moment.text, 600),
            "file": words.clip(moment.file, 300) if moment.file else None,
            "line": moment.line,
            "uncertainty_ns": moment.uncertainty_ns,
            "utc_ns": moment.t_ns,
        }
        yield {
            "ph": "i",
            "s": "t",
            "name": words.clip(moment.text, 80),
            "cat": "moment",
            "ts": clock.us(moment.t_ns, order),
            "pid": pid,
            "tid": MOMENTS_TID,
            "args": {key: value for key, value in args.items() if value is not None},
        }
    groups: dict[str | None, int] = {}
    for operation in diagnosis.operations:
        tid = groups.setdefault(operation.group, GROUPS_TID + len(groups))
        pid = tracks.pid(operation.rank, None)
        yield from tracks.names(pid, tid, f"group {words.clip(operation.group, 60)}" if operation.group else "operations")
        yield _operation(operation, clock) | {"pid": pid, "tid": tid}
    yield from _waits(diagnosis, clock, tracks)


class _Clock:
    """UTC nanoseconds -> microseconds after the first thing that has a time; the end of the trace for what is open."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        times = [one.t_ns for one in diagnosis.timeline if one.t_ns is not None]
        times += [one.begin_ns for one in diagnosis.operations]
        ends = [one.end_ns for one in diagnosis.operations if one.end_ns is not None]
        self.zero_ns = min(times, default=None)
        self.zero = "the first moment" if times else "no moment has a time: they stand a millisecond apart, in their order"
        last = max([*times, *ends], default=0) - (self.zero_ns or 0) if times else len(diagnosis.timeline) * STEP_NS
        self.end_us = round(max(last, STEP_NS) / 1e3, 3)

    def us(self, t_ns: int | None, order: int = 0) -> float:
        """Where a moment stands; one without a time at the end, or by its order where none has one."""
        if self.zero_ns is None:
            return round(order * STEP_NS / 1e3, 3)
        return self.end_us if t_ns is None else round((t_ns - self.zero_ns) / 1e3, 3)


class _Tracks:
    """The processes of the trace: the job, hosts, ranks."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        hosts = dict.fromkeys(one.host for one in diagnosis.timeline if one.rank is None and one.host is not None)
        self._hosts = {host: HOST_PID + number for number, host in enumerate(list(hosts)[: RANK_PID - HOST_PID])}
        self._at = {one.rank: one.host for one in diagnosis.timeline if one.rank is not None and one.host is not None}
        self._names = {JOB_PID: "job"} | {pid: f"host {words.clip(host, 60)}" for host, pid in self._hosts.items()}
        self._known: set[tuple[int, int]] = set()

    def pid(self, rank: int | None, host: str | None) -> int:
        if rank is None:
            return self._hosts.get(host, JOB_PID) if host is not None else JOB_PID
        at = self._at.get(rank)
        self._names[RANK_PID + rank] = f"rank {rank}" + (f" ({words.clip(at, 60)})" if at else "")
        return RANK_PID + rank

    def names(self, pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
        """The names of a process and of a thread, the first time each is seen."""
        for key, what, value in (((pid, 0), "process", self._names[pid]), ((pid, tid), "thread", name)):
            if key not in self._known:
                self._known.add(key)
                common: Mapping[str, Any] = {"ph": "M", "pid": pid, "tid": key[1]}
                yield {**common, "name": f"{what}_name", "args": {"name": value}}
                yield {**common, "name": f"{what}_sort_index", "args": {"sort_index": pid if what == "process" else tid}}


def _operation(one: Operation, clock: _Clock) -> dict[str, Any]:
    args = {key: value for key, value in (("seq", one.seq), ("state", one.state), ("group", one.group)) if value is not None}
    name = words.clip(one.name, 60)
    event = {"cat": "collective", "ts": clock.us(one.begin_ns), "args": args}
    if one.end_ns is None:
        return event | {
            "ph": "X",
            "name": f"{name} (never completed)",
            "dur": max(round(clock.end_us - clock.us(one.begin_ns), 3), 0),
        }
    return event | {"ph": "X", "name": name, "dur": max(round((one.end_ns - one.begin_ns) / 1e3, 3), 0)}


def _waits(diagnosis: Diagnosis, clock: _Clock, tracks: _Tracks) -> Iterator[dict[str, Any]]:
    """A slice for each rank that waits or is waited for, and an arrow from the one to the other."""
    open_since = {one.rank: one.begin_ns for one in diagnosis.operations if one.end_ns is None}
    drawn: dict[int, tuple[float, float]] = {}
    doing = {one.rank: one for one in diagnosis.waits}
    numbers = count(1)
    for one in diagnosis.waits[:ARROWS]:
        for rank in (one.rank, one.awaits):
            if rank in drawn:
                continue
            begin = clock.us(open_since[rank]) if rank in open_since else 0.0
            drawn[rank] = (begin, max(round(clock.end_us - begin, 3), 1.0))
            pid = tracks.pid(rank, None)
            yield from tracks.names(pid, WAITS_TID, "waits")
            mine = doing.get(rank)
            operation = words.clip(
                f"{mine.operation} of {mine.group}" if mine and mine.group else mine.operation if mine else "", 80
            )
            name = f"waits in {operation}" if mine else "is waited for"
            yield {
                "ph": "X",
                "name": name,
                "cat": "wait",
                "ts": begin,
                "dur": drawn[rank][1],
                "pid": pid,
                "tid": WAITS_TID,
                "args": {},
            }
        number = next(numbers)
        name = words.clip(one.operation, 60)
        for phase, rank in (("s", one.rank), ("f", one.awaits)):
            begin, length = drawn[rank]
            at = max(begin, drawn[one.rank][0]) if phase == "f" else begin
            arrow: dict[str, Any] = {"ph": phase, "id": number, "name": name, "cat": "wait", "ts": min(at, begin + length)}
            arrow |= {"bp": "e"} if phase == "f" else {}
            yield arrow | {"pid": tracks.pid(rank, None), "tid": WAITS_TID}
