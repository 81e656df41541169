"""Flight Recorder dumps as compact columns, for matching the calls of thousands of ranks.

`flight_recorder` gives one dump as a table with everything in it. Here each dump becomes a few arrays at once, about 30 bytes a
call, and what calls have in common (operation, shapes, dtypes, call sites) is kept once for all ranks.
"""

from __future__ import annotations

import gc
import marshal
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dtprobe.readers.artifact import Problems, ReaderError, as_int, as_text, note, read_bytes
from dtprobe.readers.flight_dump import IN_TORCH, content, ranks_of, split_name

SCHEDULED, STARTED, DONE = 0, 1, 2
"""States of a call. Gloo says "scheduled" throughout: there only `retired` tells that a call is done."""

COALESCED = "coalesced"
_ENTRY_BYTES = 20
_MOST = 2**32
_UNKNOWN = math.nan


class Kind(NamedTuple):
    """What a call does. `ins` and `outs` are the elements of each tensor; None where the dump does not say."""

    op: str
    ins: tuple[int, ...] | None
    outs: tuple[int, ...] | None
    dtypes: tuple[str, ...] | None
    shapes: str
    backend: str | None = None


class Lane(NamedTuple):
    """Calls that are matched with each other: those of a group, or those between two of its ranks, counted within the group."""

    group: str
    src: int = -1
    dst: int = -1

    @property
    def p2p(self) -> bool:
        return self.src >= 0


class Column:
    """The calls of one rank in one lane, oldest first: parallel arrays.

    `seq` counts collectives of the group, or all point-to-point calls that the rank made in it. `kind` and `site` are places in the
    tables. `created` is in ns, `took` in ms (NaN where not known), `order` counts the rank's calls in all lanes.
    """

    __slots__ = ("created", "kind", "order", "seq", "site", "state", "took")

    def __init__(self) -> None:
        self.seq = array("I")
        self.kind = array("I")
        self.site = array("I")
        self.state = bytearray()
        self.created = array("q")
        self.took = array("f")
        self.order = array("I")

    def __len__(self) -> int:
        return len(self.seq)

    def at(self, seq: int) -> int | None:
        """The place of the call with this number; the last where several have it."""
        count = len(self.seq)
        if not count:
            return None
        place = seq - self.seq[0]
        if 0 <= place < count and self.seq[place] == seq:
            return place
        return next((one for one in range(count - 1, -1, -1) if self.seq[one] == seq), None)

    @property
    def even(self) -> bool:
        """Whether the numbers rise by one from call to call."""
        return not self.seq or self.seq[-1] - self.seq[0] == len(self.seq) - 1


@dataclass
class Tables:
    """What the calls of all ranks have in common."""

    kinds: list[Kind] = field(default_factory=list)
    sites: list[str] = field(default_factory=lambda: [""])
    _kinds: dict[bytes, int] = field(default_factory=dict)
    _sites: dict[str, int] = field(default_factory=lambda: {"": 0})

    def kind(self, key: bytes, op: str, backend: str | None, entry: Mapping[str, Any]) -> int:
        number = self._kinds.get(key)
        if number is None:
            number = self._add(key, _kind(op, backend, entry))
        return number

    def joined(self, first: int, second: int) -> int:
        """The kind of a call that was made in parts."""
        key = b"+" + first.to_bytes(4) + second.to_bytes(4)
        number = self._kinds.get(key)
        if number is None:
            one, other = self.kinds[first], self.kinds[second]
            op = one.op if other.op == COALESCED or other.op in one.op.split("+") else f"{one.op}+{other.op}"
            if other.op == COALESCED:
                op = f"{COALESCED} {op}"
            made = Kind(
                op,
                _both(one.ins, other.ins),
                _both(one.outs, other.outs),
                _both(one.dtypes, other.dtypes),
                one.shapes,
                one.backend,
            )
            number = self._add(key, made)
        return number

    def site(self, text: str) -> int:
        number = self._sites.get(text)
        if number is None:
            number = self._sites[text] = len(self.sites)
            self.sites.append(text)
        return number

    def _add(self, key: bytes, kind: Kind) -> int:
        number = self._kinds[key] = len(self.kinds)
        self.kinds.append(kind)
        return number


class Status(NamedTuple):
    """The numbers of the last collectives of a group, by the rank's own count."""

    enqueued: int
    started: int | None
    completed: int | None


@dataclass
class RankCalls:
    """One dump. `groups` are those it lists, with their ranks where it tells them; `described` what groups are called.

    `cut` says that calls may be missing at its end, `wrapped` at its beginning. `timed`: it tells which calls have started.
    `dumped_ns` is the last time in it, where it stamps times.
    """

    name: str
    size: int
    version: str
    groups: dict[str, tuple[int, ...] | None]
    described: dict[str, str]
    columns: dict[Lane, Column]
    status: dict[str, Status]
    cut: bool
    wrapped: bool
    timed: bool
    dumped_ns: int
    last_ns: int
    backends: frozenset[str]

    @property
    def count(self) -> int:
        return sum(map(len, self.columns.values()))


def read_calls(path: Path, tables: Tables, name: str, problems: Problems | None = None) -> RankCalls:
    """One dump, pickle or JSON. Raises ReaderError for what holds no entries, and for a pickle that would run code."""
    data = read_bytes(path)
    found: Problems = []
    with _no_collection():
        whole = content(path, data, found)
        entries = whole.get("entries")
        if not isinstance(entries, list):
            raise ReaderError(
                f"{name} is not a Flight Recorder dump: it has no list of entries", "dump with torch 2.2 or later"
            )
        most = len(data) // _ENTRY_BYTES + 1
        if len(entries) > most:
            note(found, path, "refused", f"{len(entries)} entries in {len(data)} bytes: only {most} are read")
        rows = [entry for entry in entries[:most] if isinstance(entry, dict) and entry]
        if problems is not None:
            problems += found
        made = _Builder(tables, rows)
        groups, described = _groups(whole.get("pg_config"))
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


class _Builder:
    """Goes through the entries once."""

    def __init__(self, tables: Tables, rows: Sequence[Mapping[str, Any]]) -> None:
        self.columns: dict[Lane, Column] = {}
        self.described: dict[str, str] = {}
        self.numbers: dict[int, str] = {}
        self.backends: set[str] = set()
        self.timed = False
        self.dumped_ns = self.last_ns = 0
        self._tables = tables
        self._known: dict[tuple[str, str, bool], tuple[Column, str, str | None, str, bool]] = {}
        self._sites: dict[int, int] = {}
        self._parts: dict[str, tuple[int, list[tuple[Column, int]]]] = {}
        self._build(rows)

    def _build(self, rows: Sequence[Mapping[str, Any]]) -> None:
        tables, known = self._tables, self._known
        for order, entry in enumerate(rows):
            get = entry.get
            pair = get("process_group", get("pg_name"))
            group = pair[0] if isinstance(pair, list | tuple) and pair else pair
            name = get("profiling_name")
            if not isinstance(name, str) or not isinstance(group, str):
                group, name = self._oldest(entry)
                if group is None or name is None:
                    continue
            is_p2p = get("is_p2p") is True
            found = known.get((group, name, is_p2p))
            if found is None:
                found = self._lane(group, name, is_p2p, pair, get("pg_id"))
            column, op, backend, group, p2p = found
            seq = get("p2p_seq_id") if p2p else get("collective_seq_id", get("seq_id"))
            if type(seq) is not int or not 0 <= seq < _MOST:
                seq = get("seq_id") if p2p else None
                if type(seq) is not int or not 0 <= seq < _MOST:
                    continue
            created = get("time_created_ns")
            if type(created) is not int or not 0 <= created < 2**63:
                micros = get("time_created_us")
                created = micros * 1000 if type(micros) is int and 0 <= micros < 2**53 else 0
            said = get("state")
            state = DONE if said == "completed" or get("retired") is True else STARTED if said == "started" else SCHEDULED
            took = get("duration_ms")
            if type(took) is not float:
                took = _UNKNOWN
            self._times(get("time_discovered_started_ns"), get("time_discovered_completed_ns"), created)
            if op == COALESCED and self._closes(column, group, seq, state, took, p2p, entry):
                continue
            try:
                key = marshal.dumps((name, get("input_sizes"), get("output_sizes"), get("input_dtypes")), 0)
            except ValueError:
                continue
            kind = tables.kind(key, op, backend, entry)
            if not p2p and column.seq and column.seq[-1] == seq:
                column.kind[-1] = tables.joined(column.kind[-1], kind)
                column.state[-1] = min(column.state[-1], state)
                continue
            column.seq.append(seq)
            column.kind.append(kind)
            frames = get("frames")
            column.site.append(self._site(frames) if frames else 0)
            column.state.append(state)
            column.created.append(created)
            column.took.append(took)
            column.order.append(order)
            if p2p:
                held = self._parts.get(group)
                if held is None or held[0] != seq:
                    held = self._parts[group] = (seq, [])
                held[1].append((column, len(column) - 1))

    def _oldest(self, entry: Mapping[str, Any]) -> tuple[str | None, str | None]:
        """Torch before 2.4 gave the group's number only."""
        number, name = entry.get("pg_id"), entry.get("profiling_name")
        return (str(number), name) if type(number) is int and isinstance(name, str) else (None, None)

    def _lane(self, group: str, name: str, is_p2p: bool, pair: Any, number: Any) -> tuple[Column, str, str | None, str, bool]:
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
        made = self._known[group, name, is_p2p] = (column, str(op), backend, group, p2p)
        return made

    def _times(self, started: Any, completed: Any, created: int) -> None:
        if type(started) is int and 0 < started < 2**63:
            self.timed = True
            self.dumped_ns = max(self.dumped_ns, started)
        if type(completed) is int and 0 < completed < 2**63:
            self.dumped_ns = max(self.dumped_ns, completed)
        self.last_ns = max(self.last_ns, created)

    def _closes(
        self, column: Column, group: str, seq: int, state: int, took: float, p2p: bool, entry: Mapping[str, Any]
    ) -> bool:
        """The end of a batch tells how its parts are: these are never updated themselves."""
        if p2p:
            number, parts = self._parts.get(group, (-1, []))
            for part, place in parts if number == seq else ():
                part.state[place], part.took[place] = state, took
            return True
        if column.seq and column.seq[-1] == seq:
            kind = self._tables.kind(b"coalesced", COALESCED, None, {})
            column.kind[-1] = self._tables.joined(column.kind[-1], kind)
            column.state[-1], column.took[-1] = state, took
            return True
        return False

    def _site(self, frames: Any) -> int:
        if not isinstance(frames, list | tuple):
            return 0
        first = 0
        for frame in frames[:64]:
            number = self._sites.get(id(frame))
            if number is None:
                number = self._sites[id(frame)] = self._frame(frame)
            if number > 0:
                return number
            first = first or number
        return -first

    def _frame(self, frame: Any) -> int:
        """Its number in the table; negative for a frame of torch's."""
        get = frame.get if isinstance(frame, dict) else {}.get
        file, line, name = as_text(get("filename")) or "?", as_int(get("line")), as_text(get("name")) or "?"
        number = self._tables.site((f"{file}:{line} {name}" if line is not None else f"{file} {name}")[:400])
        return -number if IN_TORCH.search(file) else number


def _kind(op: str, backend: str | None, entry: Mapping[str, Any]) -> Kind:
    ins, outs, dtypes = entry.get("input_sizes"), entry.get("output_sizes"), entry.get("input_dtypes")
    return Kind(op, _elements(ins), _elements(outs), _names(dtypes), _shapes(ins), backend)


def _elements(shapes: Any) -> tuple[int, ...] | None:
    if not isinstance(shapes, list | tuple):
        return None
    found = []
    for shape in shapes:
        if not isinstance(shape, list | tuple) or not all(type(size) is int for size in shape):
            return None
        found.append(math.prod(shape))
    return tuple(found)


def _names(values: Any) -> tuple[str, ...] | None:
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        return None
    return tuple(values)


def _shapes(shapes: Any) -> str:
    text = str(shapes) if isinstance(shapes, list | tuple) else ""
    return text if len(text) <= 60 else text[:57] + "..."


def _both(one: tuple[Any, ...] | None, other: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return one if other is None else other if one is None else one + other


def _groups(config: Any) -> tuple[dict[str, tuple[int, ...] | None], dict[str, str]]:
    groups: dict[str, tuple[int, ...] | None] = {}
    described: dict[str, str] = {}
    for key, value in config.items() if isinstance(config, dict) else ():
        told = value if isinstance(value, dict) else {}
        ranks = ranks_of(told.get("ranks"))
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
