"""Which recorded calls a rank made within a unit of work that it recorded: its own times on its own clock, so that none is compared."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from dtprobe.diagnose.analysts.collectives.recording import Call, Recording
from dtprobe.diagnose.seen.observed import Try


def calls_between(recording: Recording, rank: int, begun_ns: int, ended_ns: int) -> list[Call]:
    """The collectives that a rank called from one moment to another, in the order of its calls."""
    calls = recording.ranks.get(rank)
    if calls is None:
        return []
    found = []
    for lane, column in calls.columns.items():
        if not lane.p2p:
            found += [
                (column.order[place], Call(rank, lane, place))
                for place, created in enumerate(column.created)
                if begun_ns <= created <= ended_ns
            ]
    return [call for _, call in sorted(found, key=lambda one: one[0])]


def calls_in(recording: Recording, one: Try) -> list[Call]:
    """The collectives of one try; none of one that never ended."""
    return [] if one.ended_ns is None else calls_between(recording, one.rank, one.begun_ns, one.ended_ns)


def rounds(tries: tuple[Try, ...]) -> Iterator[tuple[str, list[dict[int, Try]]]]:
    """Of each unit of work its repetitions, each with the try of every rank: the first of each rank, the second, and so on."""
    ordered = sorted(tries, key=lambda one: one.what)
    for what, some in groupby(ordered, key=lambda one: one.what):
        by_rank: dict[int, list[Try]] = {}
        for one in sorted(some, key=lambda each: each.begun_ns):
            by_rank.setdefault(one.rank, []).append(one)
        count = min(map(len, by_rank.values()))
        yield what, [{rank: own[number] for rank, own in by_rank.items()} for number in range(count)]
