"""From the ranks' flight recorders to a suspicion: which collective is open without progress, and who is behind.

Pure functions over the records. torch's form of them: `FlightRecorder.hpp` (version 2.10). On gloo `state` stays
"scheduled" and only `retired` tells that an operation ended, failed ones included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Keys come in alphabetical order, entries hold no braces: an open one shows without parsing the rest (which costs more).
_OPEN = re.compile(rb'"retired":false[^{}]*?"time_created_ns":(\d+),"time_d[^{}]*?"timeout_ms":(\d+)')


UNLIMITED_MS = 10**15
"""The timeout of an operation that has none."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A collective as a rank recorded it."""

    name: str
    group: str
    group_desc: str
    seq: int
    sizes: str
    created_ns: int
    timeout_ms: int
    open: bool

    def __str__(self) -> str:
        return f"{self.name} {self.sizes} (seq {self.seq} of {self.group_desc or self.group})"


@dataclass(frozen=True, kw_only=True)
class Records:
    """What one rank recorded: its operations, oldest first, and the members of groups that the backend told."""

    operations: tuple[Operation, ...]
    members: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def last(self, group: str) -> Operation | None:
        return max((one for one in self.operations if one.group == group), key=lambda one: one.seq, default=None)

    def at(self, group: str, seq: int) -> Operation | None:
        return next((one for one in reversed(self.operations) if one.group == group and one.seq == seq), None)


@dataclass(frozen=True, kw_only=True)
class Stall:
    """An operation that is open on `waiting` ranks; `behind` are members of its group that never called it."""

    operation: Operation
    waiting: tuple[int, ...]
    behind: tuple[int, ...]
    others: Mapping[int, Operation]
    """Ranks that called another operation, or with other sizes, at the same place."""

    @property
    def key(self) -> tuple[str, int]:
        return self.operation.group, self.operation.seq


def open_ages(text: bytes, now_ns: int) -> list[tuple[float, float]]:
    """(age, timeout) in seconds of every operation that a recorder's JSON shows open."""
    return [((now_ns - int(found[1])) / 1e9, int(found[2]) / 1e3) for found in _OPEN.finditer(text)]


def parse(text: bytes) -> Records:
    """The records in torch's JSON. Raises ValueError for other text."""
    whole = json.loads(text)
    operations = tuple(
        Operation(
            name=entry["profiling_name"],
            group=entry["process_group"][0],
            group_desc=entry["process_group"][1],
            seq=entry["collective_seq_id"],
            sizes=json.dumps(entry.get("input_sizes", []), separators=(",", ":")),
            created_ns=entry["time_created_ns"],
            timeout_ms=entry["timeout_ms"],
            open=not entry["retired"] and entry["state"] != "completed",
        )
        for entry in whole.get("entries", ())
        if not entry["is_p2p"]
    )
    return Records(operations=operations, members=_members(whole.get("pg_config", {})))


def find(
    records: Mapping[int, Records], now_ns: int, suspect_s: float, world_size: int, fresh: Collection[int] | None = None
) -> list[Stall]:
    """Operations open for longer than `suspect_s`, or than half of their own timeout; the oldest of each group.

    `fresh` are the ranks whose records are of now (None: all). What an older record shows open may long be done: such a rank
    only tells how far it had come.
    """
    now = records.keys() if fresh is None else fresh
    oldest: dict[str, Operation] = {}
    for rank in sorted(now):
        for operation in records[rank].operations:
            limit_s = min(suspect_s, operation.timeout_ms / 2e3)
            if operation.open and (now_ns - operation.created_ns) / 1e9 >= limit_s:
                first = oldest.get(operation.group)
                if first is None or operation.seq < first.seq:
                    oldest[operation.group] = operation
    return [_stall(operation, records, world_size, now) for operation in oldest.values()]


def _stall(operation: Operation, records: Mapping[int, Records], world_size: int, now: Collection[int]) -> Stall:
    waiting, behind, others = [], [], {}
    for rank in sorted(_group(operation, records, world_size)):
        mine = records.get(rank)
        here = mine.at(operation.group, operation.seq) if mine else None
        last = mine.last(operation.group) if mine else None
        if here is not None and here.open and rank in now:
            waiting.append(rank)
        if last is None or last.seq < operation.seq:
            behind.append(rank)
        elif here is not None and (here.name, here.sizes) != (operation.name, operation.sizes):
            others[rank] = here
    return Stall(operation=operation, waiting=tuple(waiting), behind=tuple(behind), others=others)


def _group(operation: Operation, records: Mapping[int, Records], world_size: int) -> Iterable[int]:
    """Members of the operation's group: as the backend told them, the world for the default group, else who used it."""
    for one in records.values():
        if told := one.members.get(operation.group):
            return told
    if operation.group_desc == "default_pg":
        return range(world_size)
    return [rank for rank, one in records.items() if one.last(operation.group) is not None]


def _members(config: Mapping[str, Any]) -> dict[str, frozenset[int]]:
    """gloo leaves the list empty, whoever is in the group."""
    found = {}
    for group, about in config.items():
        try:
            ranks = json.loads(about["ranks"])
        except (KeyError, TypeError, ValueError):
            continue
        if ranks:
            found[group] = frozenset(ranks)
    return found
