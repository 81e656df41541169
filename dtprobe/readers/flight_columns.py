"""Calls of collectives as compact columns, about 30 bytes a call; what calls have in common is kept once for all ranks."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from dtprobe.readers.flight_dump import ranks_of

SCHEDULED, STARTED, DONE = 0, 1, 2
"""States of a call. Gloo says "scheduled" throughout: there only `retired` tells that a call is done."""

COALESCED = "coalesced"
_JOINED = b"+"
"""Begins the keys of kinds joined from two; marshal writes tuples with another letter."""


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
    _members: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    _sites: dict[str, int] = field(default_factory=lambda: {"": 0})

    def kind(self, key: bytes, op: str, backend: str | None, ins: Any, outs: Any, dtypes: Any) -> int:
        """The number of the kind of call with these tensors; `key` stands for all of them."""
        number = self._kinds.get(key)
        if number is None:
            number = self._add(key, Kind(op, _elements(ins), _elements(outs), _names(dtypes), _shapes(ins), backend))
        return number

    def joined(self, first: int, second: int) -> int:
        """The kind of a call that was made in parts."""
        key = _JOINED + first.to_bytes(4) + second.to_bytes(4)
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

    def kinds_from(self, number: int) -> list[tuple[bytes, Kind]]:
        """The kinds with this number and those after it, each with its key."""
        return list(zip(islice(self._kinds, number, None), self.kinds[number:], strict=True))

    def put(self, key: bytes, kind: Kind, parts: Sequence[int]) -> int:
        """The number here of a kind from other tables (`kinds_from`), whose own numbers below it are `parts` here."""
        if key[:1] == _JOINED:
            return self.joined(parts[int.from_bytes(key[1:5])], parts[int.from_bytes(key[5:9])])
        number = self._kinds.get(key)
        return self._add(key, kind) if number is None else number

    def site(self, text: str) -> int:
        number = self._sites.get(text)
        if number is None:
            number = self._sites[text] = len(self.sites)
            self.sites.append(text)
        return number

    def members(self, value: Any) -> tuple[int, ...] | None:
        """The ranks of a group, the same tuple for all who say the same."""
        text = value if isinstance(value, str) else repr(value)
        if text not in self._members:
            self._members[text] = ranks_of(value)
        return self._members[text]

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
    `dumped_ns` is when it was taken, where it stamps an open call with that; `last_ns` when its last call was made.
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
    limits: dict[str, int] = field(default_factory=dict)
    """The time-out of each group in ms, as its first recorded call has it."""

    @property
    def count(self) -> int:
        return sum(map(len, self.columns.values()))

    def move(self, placed_ns: Callable[[int], int]) -> None:
        """Put all stamps on another clock."""
        for column in self.columns.values():
            column.created = array("q", map(placed_ns, column.created))
        self.last_ns, self.dumped_ns = (placed_ns(one) if one else one for one in (self.last_ns, self.dumped_ns))


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
