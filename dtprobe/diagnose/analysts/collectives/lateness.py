"""Ranks that come late to collectives again and again, where all complete.

Where dumps tell how long each rank was in a call, the last one to enter is the one that was in it shortest: that needs no clock.
Without, the time that each rank took from its call before is compared with the others': on its own clock, so that none is compared.
Late is who is late to most calls of one kind, more often than chance has it, and by more than a few percent of the time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dtprobe.diagnose.analysts.collectives.kinds import base
from dtprobe.diagnose.analysts.collectives.recording import SYNCHRONISING, Call, Group, Recording
from dtprobe.readers.flight_columns import DONE, Column, Lane

RECENT = 1000
"""So many of a group's last calls are looked at."""
LEAST_MS = 1.0
MOST_CALLS = 0.7
SHARE = 0.05
"""Of the time that the calls span, the others' waiting must be at least this."""
CHANCE = 1e-3
FEWEST = 4
FEWEST_BY_CLOCK = 3
"""Of two ranks, the times of their calls alone do not tell which is late."""


@dataclass(frozen=True, kw_only=True)
class Late:
    """`ranks` were late to `count` of `calls` calls of one kind in `group`, the others waiting `waited_ms` in all of `span_ms`."""

    ranks: tuple[int, ...]
    group: Group
    count: int
    calls: int
    waited_ms: float
    span_ms: float
    shown: tuple[tuple[Call, float], ...]
    timed: bool


@dataclass(frozen=True, slots=True)
class _Moment:
    """One call of all ranks: by how many ms each was late, against the middle one."""

    seq: int
    kind: int
    late: Sequence[float]


def late(recording: Recording) -> Late | None:
    """The ranks that cost the others most; None where nobody is late beyond jitter."""
    found: list[Late] = []
    suffered: dict[int, float] = defaultdict(float)
    for group, ranks in recording.groups().items():
        columns = {rank: recording.ranks[rank].columns[Lane(group.name)] for rank in ranks}
        if len(columns) > 1:
            one = _of_group(recording, group, columns, suffered)
            if one is not None:
                found.append(one)
    # who waits for others about as long as it makes others wait only hands on a delay
    own = [one for one in found if all(suffered[rank] < one.waited_ms / 2 for rank in one.ranks)]
    return max(own, key=lambda one: one.waited_ms, default=None)


def _of_group(recording: Recording, group: Group, columns: dict[int, Column], suffered: dict[int, float]) -> Late | None:
    if not all(column.even and len(column) for column in columns.values()):
        return None
    low, high = max(column.seq[0] for column in columns.values()), min(column.seq[-1] for column in columns.values())
    window = [seq for seq in range(max(low, high - RECENT), high + 1) if _counts(recording, columns, seq)]
    if len(window) < FEWEST:
        return None
    ranks = list(columns)
    moments = list(_by_duration(columns, window))
    timed = len(moments) >= FEWEST
    if not timed:
        if len(ranks) < FEWEST_BY_CLOCK:
            return None
        moments = list(_by_clock(columns, window))
    by_kind: dict[int, list[_Moment]] = {}
    waited: dict[int, float] = defaultdict(float)
    for moment in moments:
        worst = max(moment.late)
        if worst >= LEAST_MS:
            by_kind.setdefault(moment.kind, []).append(moment)
            for place in _late_ones(moment):
                waited[ranks[place]] += moment.late[place]
            for place, value in enumerate(moment.late):
                suffered[ranks[place]] += max(0.0, worst - value) if value < worst / 2 else 0.0
    first = next(iter(columns.values()))
    span_ms = (first.created[window[-1] - first.seq[0]] - first.created[window[0] - first.seq[0]]) / 1e6
    best: tuple[int, int, list[_Moment]] = (0, 0, [])
    guilty: set[int] = set()
    for some in by_kind.values():
        times = Counter(place for moment in some for place in _late_ones(moment))
        for place, count in times.items():
            if len(some) < FEWEST or count < MOST_CALLS * len(some) or waited[ranks[place]] < SHARE * span_ms:
                continue
            if len(ranks) * _chance(count, len(some), 1 / len(ranks)) < CHANCE:
                guilty.add(place)
                best = max(best, (count, len(some), some), key=lambda one: one[:2])
    if not guilty:
        return None
    place = max(guilty, key=lambda one: waited[ranks[one]])
    lane, rank = Lane(group.name), ranks[place]
    shown = [(Call(rank, lane, moment.seq - columns[rank].seq[0]), moment.late[place]) for moment in best[2][-2:]]
    return Late(
        ranks=(rank, *sorted(ranks[one] for one in guilty if one != place)),
        group=group,
        count=best[0],
        calls=best[1],
        waited_ms=waited[rank],
        span_ms=span_ms,
        shown=tuple(shown),
        timed=timed,
    )


def _counts(recording: Recording, columns: dict[int, Column], seq: int) -> bool:
    kind = None
    for column in columns.values():
        place = seq - column.seq[0]
        if column.state[place] != DONE:
            return False
        kind = column.kind[place] if kind is None else kind
    return kind is not None and base(recording.tables.kinds[kind].op) in SYNCHRONISING


def _by_duration(columns: dict[int, Column], window: Sequence[int]) -> Iterator[_Moment]:
    for seq in window:
        took = [column.took[seq - column.seq[0]] for column in columns.values()]
        if not any(math.isnan(one) for one in took):
            yield _Moment(seq, _kind(columns, seq), _against_middle([-one for one in took]))


def _by_clock(columns: dict[int, Column], window: Sequence[int]) -> Iterator[_Moment]:
    """By how much longer than the others each rank took from its call before: no clock is compared with another's."""
    for before, seq in pairwise(window):
        places = [(column, seq - column.seq[0], before - column.seq[0]) for column in columns.values()]
        took = [(column.created[now] - column.created[then]) / 1e6 for column, now, then in places]
        yield _Moment(seq, _kind(columns, seq), _against_middle(took))


def _kind(columns: dict[int, Column], seq: int) -> int:
    column = next(iter(columns.values()))
    return column.kind[seq - column.seq[0]]


def _against_middle(values: Sequence[float]) -> list[float]:
    middle = sorted(values)[(len(values) - 1) // 2]
    return [value - middle for value in values]


def _late_ones(moment: _Moment) -> list[int]:
    """A minority that was about as late as the last one."""
    worst = max(moment.late)
    found = [place for place, value in enumerate(moment.late) if value >= worst / 2]
    return found if len(found) <= max(1, len(moment.late) // 4) else []


def _chance(count: int, calls: int, odds: float) -> float:
    """The probability of `count` or more of `calls`."""
    return sum(math.comb(calls, one) * odds**one * (1 - odds) ** (calls - one) for one in range(count, calls + 1))
