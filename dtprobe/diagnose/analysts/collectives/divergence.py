"""The first call at which ranks of a group disagree: who departs from the others, and in which way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtprobe.diagnose.analysts.collectives.kinds import Meeting, base
from dtprobe.diagnose.analysts.collectives.recording import Call, Group, Recording
from dtprobe.diagnose.analysts.collectives.sequences import FAR, compared, to_come
from dtprobe.readers.flight_columns import DONE, Column, Kind, Lane

LOOK = 256
NEAR = 8.0
"""Sizes up to this many times apart may be one call's."""
PAST = 4096
ROUNDS = 8
"""So many departures of a group are told apart, one after the other."""
BARRIERS = ("barrier", "all_reduce_barrier")
TOLD = {
    "left-out": "collective-skipped",
    "added": "rank-conditional-collective",
    "exchanged": "collective-order-mismatch",
}
PLAIN = {"op": "collective-type-mismatch", "dtype": "collective-dtype-mismatch", "size": "collective-shape-mismatch"}


@dataclass(frozen=True, kw_only=True)
class Departure:
    """At `seq` of `group`, `ranks` call something else than the `others`: `theirs` against `expected`, one call of each side.

    `tie`: neither side is the odd one. `silent`: both sides' calls have completed all the same. `count` is how many calls were left
    out, added or exchanged, where `mode` says so.
    """

    mode: str
    group: Group
    seq: int
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    theirs: Call
    expected: Call
    tie: bool
    silent: bool
    at_ns: int
    count: int = 1


def departures(recording: Recording) -> list[Departure]:
    """Of every group, earliest first."""
    meeting = Meeting(recording.tables.kinds)
    found = [one for group, ranks in recording.groups().items() for one in _of_group(recording, meeting, group, ranks)]
    return sorted(found, key=lambda one: one.at_ns)


def _of_group(recording: Recording, meeting: Meeting, group: Group, ranks: Sequence[int]) -> Iterator[Departure]:
    lane = Lane(group.name)
    columns = {rank: recording.ranks[rank].columns[lane] for rank in ranks if len(recording.ranks[rank].columns[lane])}
    for _ in range(ROUNDS):
        seq = _first(meeting, columns)
        if seq is None:
            return
        classes = _classes(meeting, columns, seq)
        if len(classes) < 2:
            return
        kept, odd, tie = _sides(meeting, columns, classes, seq)
        yield _departure(recording, meeting, group, columns, seq, kept, odd, tie)
        if tie:
            return
        columns = {rank: column for rank, column in columns.items() if rank not in odd}


def _first(meeting: Meeting, columns: dict[int, Column]) -> int | None:
    """The lowest number at which any two ranks differ."""
    if len(columns) < 2:
        return None
    longest = max(columns.values(), key=len)
    found = [seq for column in columns.values() if (seq := _differ(meeting, longest, column)) is not None]
    return min(found, default=None)


def _differ(meeting: Meeting, one: Column, other: Column) -> int | None:
    if one is other:
        return None
    if not (one.even and other.even):
        places = {seq: place for place, seq in enumerate(other.seq)}
        return next(
            (
                seq
                for place, seq in enumerate(one.seq)
                if seq in places and not meeting.same(one.kind[place], other.kind[places[seq]])
            ),
            None,
        )
    low, high = max(one.seq[0], other.seq[0]), min(one.seq[-1], other.seq[-1])
    if low > high:
        return None
    mine = one.kind[low - one.seq[0] : high - one.seq[0] + 1]
    yours = other.kind[low - other.seq[0] : high - other.seq[0] + 1]
    if mine == yours:  # by far the most: as fast as memory is compared
        return None
    return next((low + at for at, pair in enumerate(zip(mine, yours, strict=True)) if not meeting.same(*pair)), None)


def _classes(meeting: Meeting, columns: dict[int, Column], seq: int) -> list[list[int]]:
    """Ranks by what they called there, the largest class first."""
    classes: list[tuple[int, list[int]]] = []
    for rank, column in columns.items():
        place = column.at(seq)
        if place is None:
            continue
        kind = column.kind[place]
        known = next((ranks for other, ranks in classes if meeting.same(kind, other)), None)
        if known is None:
            classes.append((kind, [rank]))
        else:
            known.append(rank)
    return sorted((ranks for _, ranks in classes), key=lambda ranks: (-len(ranks), ranks[0]))


def _sides(
    meeting: Meeting, columns: dict[int, Column], classes: Sequence[Sequence[int]], seq: int
) -> tuple[list[int], list[int], bool]:
    """Who stays and who departs. Where no side is larger: who calls what it called before at such a place stays."""
    if len(classes[0]) > len(classes[1]):
        kept = classes[0]
    else:
        usual = [ranks for ranks in classes if _usual(meeting, columns[ranks[0]], seq)]
        known = [ranks for ranks in classes if _known(meeting, columns[ranks[0]], seq)]
        alone = usual if len(usual) == 1 else known if len(known) == 1 else []
        if not alone:
            return list(classes[0]), [rank for ranks in classes[1:] for rank in ranks], True
        kept = alone[0]
    return list(kept), sorted(rank for ranks in classes if ranks is not kept for rank in ranks), False


def _usual(meeting: Meeting, column: Column, seq: int) -> bool:
    place = column.at(seq)
    if place is None:
        return False
    past = column.kind[max(0, place - PAST) : place]
    ahead = to_come([meeting.alike(kind) for kind in past])
    return bool(ahead) and meeting.same(ahead[0], column.kind[place])


def _known(meeting: Meeting, column: Column, seq: int) -> bool:
    place = column.at(seq)
    return place is not None and any(meeting.same(column.kind[place], kind) for kind in set(column.kind[:place]))


def _departure(
    recording: Recording,
    meeting: Meeting,
    group: Group,
    columns: dict[int, Column],
    seq: int,
    kept: Sequence[int],
    odd: Sequence[int],
    tie: bool,
) -> Departure:
    lane = Lane(group.name)
    # of the others, who went furthest shows best what was to come
    model = max(kept, key=lambda rank: columns[rank].seq[-1])
    rank = min(odd, key=lambda one: (columns[one].created[columns[one].at(seq) or 0], one))
    expected = Call(model, lane, columns[model].at(seq) or 0)
    theirs = Call(rank, lane, columns[rank].at(seq) or 0)
    mode, count = _story(recording, meeting, columns[model], columns[rank], expected.place, theirs.place)
    return Departure(
        mode=mode,
        group=group,
        seq=seq,
        ranks=(rank, *sorted(set(odd) - {rank})),
        others=tuple(sorted(kept)),
        theirs=theirs,
        expected=expected,
        tie=tie,
        silent=recording.state(expected) == DONE and recording.state(theirs) == DONE,
        at_ns=min(recording.created(expected), recording.created(theirs)),
        count=count,
    )


def _near(one: Kind, other: Kind) -> bool:
    """Sizes that one call may have on two ranks; an extra call is another matter, as of a counter beside gradients."""
    low, high = sorted(sum(kind.ins or ()) for kind in (one, other))
    return low > 0 and high / low <= NEAR


def _story(recording: Recording, meeting: Meeting, model: Column, odd: Column, here: int, there: int) -> tuple[str, int]:
    """The mode, and how many calls are concerned."""
    ours = model.kind.tolist()[here : here + LOOK]
    theirs = odd.kind.tolist()[there : there + LOOK]
    plain = meeting.difference(ours[0], theirs[0])
    sites = recording.tables.sites
    site, other_site = sites[model.site[here]], sites[odd.site[there]]
    if plain == "op" and site and site == other_site:
        return PLAIN["op"], 1  # one line of code, two operations
    ahead = ours
    if len(ours) < FAR:
        # A rank whose processor waits in this very call shows nothing behind it: what came the last time stands for it.
        past = model.kind[max(0, here - PAST) : here + len(ours)]
        ahead = ours + to_come([meeting.alike(kind) for kind in past], FAR)
    how, count = compared(ahead, theirs, meeting.same, len(ours))
    kinds = recording.tables.kinds
    if (plain, how, count) == ("size", "added", 1):
        # NCCL lets the smaller side go on, so that it looks one call ahead: the same line with less, or a line more?
        same_line = site == other_site if site and other_site else _near(kinds[ours[0]], kinds[theirs[0]])
        return (PLAIN["size"] if same_line else TOLD[how]), 1
    if how in TOLD:
        return TOLD[how], count
    if base(kinds[theirs[0]].op) in BARRIERS and site != other_site and _begins_again(meeting, model, here):
        return "uneven-dataloader-desync", 1
    return PLAIN[plain or "op"], 1


def _begins_again(meeting: Meeting, column: Column, place: int) -> bool:
    """Whether the call is the first of what the rank calls again and again."""
    return place > 0 and meeting.same(column.kind[0], column.kind[place])
