"""Flight Recorder dumps as compact columns, for matching the calls of thousands of ranks.

`flight_recorder` gives one dump as a table with everything in it. Here each dump becomes a few arrays at once (`flight_columns`).
"""

from __future__ import annotations

import gc
import marshal
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from dtprobe.readers.artifact import Problems, ReaderError, as_int, as_text, note, read_bytes
from dtprobe.readers.flight_columns import COALESCED, DONE, SCHEDULED, STARTED, Column, Lane, RankCalls, Status, Tables
from dtprobe.readers.flight_dump import IN_TORCH, content, split_name

_ENTRY_BYTES = 20
_MOST = 2**32
_LATEST = 2**63
_UNKNOWN = math.nan
_FIELDS = itemgetter(
    *("profiling_name", "process_group", "is_p2p", "collective_seq_id", "p2p_seq_id", "time_created_ns", "state", "retired"),
    *("time_discovered_started_ns", "input_sizes", "output_sizes", "input_dtypes"),
)


def read_calls(path: Path, tables: Tables, name: str, problems: Problems | None = None) -> RankCalls:
    """One dump, pickle or JSON. Raises ReaderError for what holds no entries, and for a pickle that would run code."""
    data = read_bytes(path)
    with _no_collection():
        return _read(path, data, tables, name, problems)


def _read(path: Path, data: bytes, tables: Tables, name: str, problems: Problems | None) -> RankCalls:
    found: Problems = []
    whole = content(path, data, found)
    entries = whole.get("entries")
    if not isinstance(entries, list):
        raise ReaderError(f"{name} is not a Flight Recorder dump: it has no list of entries", "dump with torch 2.2 or later")
    most = len(data) // _ENTRY_BYTES + 1
    if len(entries) > most:
        note(found, path, "refused", f"{len(entries)} entries in {len(data)} bytes: only {most} are read")
    rows = [entry for entry in entries[:most] if isinstance(entry, dict) and entry]
    if problems is not None:
        problems += found
    made = _Builder(tables, rows)
    groups, described = _groups(whole.get("pg_config"), tables)
    for group, text in made.described.items():
        described.setdefault(group, text)
    first = as_int(rows[0].get("record_id")) if rows else None
    return RankCalls(
        name=name,
        size=len(data),
        version=as_text(whole.get("version")) or "",
        groups=groups,
        described=described,
        columns=made.columns,
        status=_status(whole.get("pg_status"), made.numbers, list(groups)),
        cut=any(one.kind in ("cut", "refused") for one in found),
        wrapped=bool(first),
        timed=made.timed,
        dumped_ns=made.dumped_ns,
        last_ns=made.last_ns,
        backends=frozenset(made.backends),
        limits=made.limits,
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the cycle collector, which would walk the hundred thousand objects of a dump again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


_Found = tuple[Column, str, str | None, bool]
"""Of a group and a name: where its calls go, operation, backend, whether it is point to point."""


class _Builder:
    """Goes through the entries once."""

    def __init__(self, tables: Tables, rows: Sequence[Mapping[str, Any]]) -> None:
        self.columns: dict[Lane, Column] = {}
        self.described: dict[str, str] = {}
        self.numbers: dict[int, str] = {}
        self.limits: dict[str, int] = {}
        self.backends: set[str] = set()
        self.timed = False
        self.dumped_ns = self.last_ns = 0
        self._tables = tables
        self._known: dict[tuple[Any, Any, Any], _Found] = {}
        self._sites: dict[int, int] = {}
        self._parts: dict[str, tuple[int, list[tuple[Column, int]]]] = {}
        self._build(rows)

    def _build(self, rows: Sequence[Mapping[str, Any]]) -> None:
        tables, known, sites, last = self._tables, self._known, self._sites, 0
        for order, entry in enumerate(rows):
            try:
                name, pair, is_p2p, seq, p2p_seq, created, said, retired, started, ins, outs, dtypes = _FIELDS(entry)
                group = pair[0]
                found = known.get((group, name, is_p2p))
            except (KeyError, TypeError, IndexError):  # of another version, or nonsense
                name, pair, is_p2p, seq, p2p_seq, created, said, retired, started, ins, outs, dtypes = _other(entry)
                group = pair[0]
                found = known.get((group, name, is_p2p)) if name is not None else None
            if found is None:
                if not isinstance(name, str) or not isinstance(group, str):
                    continue
                found = self._lane(group, name, is_p2p is True, pair, entry.get("pg_id"))
                known[group, name, is_p2p] = found
                if type(limit := entry.get("timeout_ms")) is int:
                    self.limits.setdefault(group, limit)
            column, op, backend, p2p = found
            if p2p:
                seq = p2p_seq
            if type(seq) is not int or not 0 <= seq < _MOST or type(created) is not int or not 0 <= created < _LATEST:
                continue
            state = DONE if said == "completed" or retired is True else STARTED if said == "started" else SCHEDULED
            if started:
                self.timed = True
                if state != DONE and type(started) is int and self.dumped_ns < started < _LATEST:
                    self.dumped_ns = started
            if created > last:  # noqa: PLR1730 - half a million times, a call costs more
                last = created
            took = entry.get("duration_ms", _UNKNOWN)
            if type(took) is not float:
                took = _UNKNOWN
            if op == COALESCED and self._closes(column, group, seq, state, took, p2p):
                continue
            try:
                key = marshal.dumps((name, ins, outs, dtypes), 0)
            except ValueError:
                continue
            kind = tables.kind(key, op, backend, ins, outs, dtypes)
            if not p2p and column.seq and column.seq[-1] == seq:
                column.kind[-1] = tables.joined(column.kind[-1], kind)
                column.state[-1] = min(column.state[-1], state)
                continue
            site = 0
            frames = entry.get("frames")
            if type(frames) is list:
                for frame in frames:
                    site = sites.get(id(frame)) or self._frame(frame)
                    if site > 0:
                        break
            column.seq.append(seq)
            column.kind.append(kind)
            column.site.append(abs(site))
            column.state.append(state)
            column.created.append(created)
            column.took.append(took)
            column.order.append(order)
            if p2p:
                held = self._parts.get(group)
                if held is None or held[0] != seq:
                    held = self._parts[group] = (seq, [])
                held[1].append((column, len(column) - 1))
        self.last_ns = last

    def _lane(self, group: str, name: str, is_p2p: bool, pair: Any, number: Any) -> _Found:
        backend, op, src, dst = split_name(name)
        p2p = is_p2p or src is not None
        lane = Lane(group, src, dst) if src is not None and dst is not None else Lane(group)
        ends_batch = p2p and not lane.p2p
        column = Column() if ends_batch else self.columns.setdefault(lane, Column())
        if backend:
            self.backends.add(backend)
        if isinstance(pair, list | tuple) and len(pair) > 1 and isinstance(pair[1], str):
            self.described.setdefault(group, pair[1])
        if type(number) is int:
            self.numbers.setdefault(number, group)
        return column, str(op), backend, p2p

    def _closes(self, column: Column, group: str, seq: int, state: int, took: float, p2p: bool) -> bool:
        """The end of a batch tells how its parts are: these are never updated themselves."""
        if p2p:
            number, parts = self._parts.get(group, (-1, []))
            for part, place in parts if number == seq else ():
                part.state[place], part.took[place] = state, took
            return True
        if column.seq and column.seq[-1] == seq:
            kind = self._tables.kind(b"coalesced", COALESCED, None, None, None, None)
            column.kind[-1] = self._tables.joined(column.kind[-1], kind)
            column.state[-1], column.took[-1] = state, took
            return True
        return False

    def _frame(self, frame: Any) -> int:
        """Its number in the table; negative for a frame of torch's."""
        get = frame.get if isinstance(frame, dict) else {}.get
        file, line, name = as_text(get("filename")) or "?", as_int(get("line")), as_text(get("name")) or "?"
        number = self._tables.site((f"{file}:{line} {name}" if line is not None else f"{file} {name}")[:400])
        number = self._sites[id(frame)] = -number if IN_TORCH.search(file) else number
        return number


def _other(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """The same fields of a dump of torch 2.2 to 2.4, which had other names and fewer of them."""
    get = entry.get
    pair = get("process_group", get("pg_name"))
    number = get("pg_id")
    if isinstance(pair, str):
        pair = (pair, "")
    elif not isinstance(pair, list | tuple) or not pair:
        pair = (str(number) if type(number) is int else None, "")
    seq = get("collective_seq_id", get("seq_id"))
    micros = get("time_created_us")
    created = get("time_created_ns", micros * 1000 if type(micros) is int else 0)
    name = get("profiling_name")
    return (
        *(name if isinstance(name, str) else None, pair if isinstance(pair[0], str) else (None, "")),
        *(get("is_p2p") is True, seq, get("p2p_seq_id", seq), created),
        *(get("state"), get("retired"), get("time_discovered_started_ns")),
        *(get("input_sizes"), get("output_sizes"), get("input_dtypes")),
    )


def _groups(config: Any, tables: Tables) -> tuple[dict[str, tuple[int, ...] | None], dict[str, str]]:
    groups: dict[str, tuple[int, ...] | None] = {}
    described: dict[str, str] = {}
    for key, value in config.items() if isinstance(config, dict) else ():
        told = value if isinstance(value, dict) else {}
        ranks = tables.members(told.get("ranks"))
        if isinstance(key, str) and (key or ranks):  # gloo lists one group without name and ranks, whatever there is
            groups[key] = ranks
            described[key] = as_text(told.get("desc")) or ""
    return groups, described


def _status(status: Any, numbers: Mapping[int, str], listed: Sequence[str]) -> dict[str, Status]:
    """By group. The dump keys it by a number of the rank's own, which entries tie to the group."""
    found: dict[str, Status] = {}
    told = {int(key): value for key, value in status.items() if _is_number(key)} if isinstance(status, dict) else {}
    if told and all(name.isdigit() for name in listed) and len(listed) == len(told):
        # both count up in the order in which the groups were made
        numbers = dict(zip(sorted(told), sorted(listed, key=int), strict=True)) | dict(numbers)
    for number, value in told.items():
        group = numbers.get(number)
        if group is None or not isinstance(value, dict):
            continue
        last = [_count(value.get(f"last_{what}_collective")) for what in ("enqueued", "started", "completed")]
        if last[0] is not None:
            found[group] = Status(last[0], last[1], last[2])
    return found


def _is_number(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10


def _count(value: Any) -> int | None:
    """A count, in JSON as text; torch writes -1 for what it does not know."""
    number = int(value) if _is_number(value) else as_int(value)
    return number if number is not None and number >= 0 else None
