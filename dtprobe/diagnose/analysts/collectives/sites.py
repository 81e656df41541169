"""Groups and lines of code that are exchanged between ranks: calls that met, though the program meant them for others.

Nothing raises where two groups of the same members were made in different orders, or where one rank took another branch to a call of the
same size. What is left are the names that each rank gave its groups, and the lines that called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from dtprobe.diagnose.analysts.collectives.kinds import Meeting
from dtprobe.diagnose.analysts.collectives.recording import Call, Group, Recording
from dtprobe.diagnose.analysts.collectives.sequences import compared, to_come
from dtprobe.readers.flight_columns import Column, Lane

SETTLED = 4
"""So many calls of equal lines stand before the first that differs."""
LOOK = 256
UNNAMED = ("", "undefined")


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """`ranks` call group `one` what the `others` call `other`, and the other way round; `theirs` and `ours` are calls of either side."""

    one: str
    other: str
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    theirs: Call
    ours: Call
    names: tuple[str, str] | None
    tie: bool


@dataclass(frozen=True, kw_only=True)
class Detour:
    """At `theirs` a rank called from another line than the others did at `expected`, and is out of step from there on.

    `how` as in `sequences`: it added or left out `count` calls.
    """

    group: Group
    rank: int
    others: tuple[int, ...]
    theirs: Call
    expected: Call
    how: str
    count: int


def exchanged(recording: Recording) -> Iterator[Exchanged]:
    """Pairs of groups of equal members that some ranks hold the other way round, by their names or by the lines that use them."""
    groups = [group for group in recording.groups() if len(group.members) > 1 and group.name]
    by_members: dict[tuple[int, ...], list[Group]] = {}
    for group in groups:
        by_members.setdefault(group.members, []).append(group)
    for members, same in by_members.items():
        seen = [rank for rank in members if rank in recording.ranks]
        for one, other in combinations(same, 2):
            sides: dict[tuple[object, object], list[int]] = {}
            for rank in seen:
                marks = _marks(recording, rank, one.name), _marks(recording, rank, other.name)
                if all(marks) and marks[0] != marks[1]:
                    sides.setdefault(marks, []).append(rank)
            turned = next((marks for marks in sides if (marks[1], marks[0]) in sides), None)
            if turned is None or len(sides) != 2:
                continue
            few, many = sorted((sides[turned], sides[turned[1], turned[0]]), key=len)
            yield _exchanged(recording, one, other, few, many)


def _marks(recording: Recording, rank: int, name: str) -> object:
    """What a rank means by a group: the name that it gave it, else the lines from which it calls it."""
    column = recording.ranks[rank].columns.get(Lane(name))
    if column is None or not len(column):
        return None
    described = recording.ranks[rank].described.get(name, "")
    if described not in UNNAMED:
        return described
    sites = frozenset(column.site)
    return None if 0 in sites else sites


def _exchanged(recording: Recording, one: Group, other: Group, few: Sequence[int], many: Sequence[int]) -> Exchanged:
    names = tuple(recording.ranks[few[0]].described.get(name, "") for name in (one.name, other.name))
    return Exchanged(
        one=one.name,
        other=other.name,
        ranks=tuple(few),
        others=tuple(many),
        theirs=Call(few[0], Lane(one.name), 0),
        ours=Call(many[0], Lane(one.name), 0),
        names=(names[0], names[1]) if all(name not in UNNAMED for name in names) else None,
        tie=len(few) == len(many),
    )


def detours(recording: Recording) -> Iterator[Detour]:
    """Of each group the first call that met one of another line, where all lines before agreed and the lines after are shifted."""
    meeting = Meeting(recording.tables.kinds)
    for group, ranks in recording.groups().items():
        columns = {rank: recording.ranks[rank].columns[Lane(group.name)] for rank in ranks}
        columns = {rank: column for rank, column in columns.items() if len(column) and column.even and 0 not in column.site}
        found = _first_detour(meeting, group, columns)
        if found is not None:
            yield found


def _first_detour(meeting: Meeting, group: Group, columns: dict[int, Column]) -> Detour | None:
    if len(columns) < 2:
        return None
    low, high = max(column.seq[0] for column in columns.values()), min(column.seq[-1] for column in columns.values())
    for seq in range(low, high + 1):
        places = {rank: seq - column.seq[0] for rank, column in columns.items()}
        sites = {rank: columns[rank].site[place] for rank, place in places.items()}
        if len(set(sites.values())) == 1:
            continue
        kinds = [columns[rank].kind[place] for rank, place in places.items()]
        if seq - low < SETTLED or not all(meeting.same(kinds[0], kind) for kind in kinds[1:]):
            return None
        return _told(group, columns, places, sites)
    return None


def _told(group: Group, columns: dict[int, Column], places: dict[int, int], sites: dict[int, int]) -> Detour | None:
    counts = Counter(sites.values()).most_common(2)
    usual = counts[0][0] if counts[0][1] > counts[1][1] else _habit(columns, places, sites)
    odd = [rank for rank, site in sites.items() if site != usual]
    kept = [rank for rank, site in sites.items() if site == usual]
    if len(odd) != 1 or not kept:
        return None
    rank, model = odd[0], max(kept, key=lambda one: columns[one].seq[-1])
    ours = columns[model].site.tolist()[places[model] : places[model] + LOOK]
    theirs = columns[rank].site.tolist()[places[rank] : places[rank] + LOOK]
    how, count = compared(ours, theirs, lambda one, other: one == other)
    if how not in ("added", "left-out"):
        return None
    lane = Lane(group.name)
    return Detour(
        group=group,
        rank=rank,
        others=tuple(kept),
        theirs=Call(rank, lane, places[rank]),
        expected=Call(model, lane, places[model]),
        how=how,
        count=count,
    )


def _habit(columns: dict[int, Column], places: dict[int, int], sites: dict[int, int]) -> int | None:
    """Of two halves: the line that was to come by what the rank did before."""
    expected = {
        sites[rank]
        for rank, column in columns.items()
        if (ahead := to_come(column.site.tolist()[: places[rank]])) and ahead[0] == sites[rank]
    }
    return expected.pop() if len(expected) == 1 else None
