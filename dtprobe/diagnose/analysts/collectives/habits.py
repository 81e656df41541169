"""Where a rank departs from what it did before: training repeats its steps, so the calls so far tell which was to come."""

from __future__ import annotations

from dataclasses import dataclass
from operator import eq

from dtprobe.diagnose.analysts.collectives.kinds import Meeting
from dtprobe.diagnose.analysts.collectives.recording import Call, Recording
from dtprobe.diagnose.analysts.collectives.sequences import FAR, How, compared, to_come
from dtprobe.readers.flight_columns import Lane

PAST = 1024
BEFORE, BEHIND = 32, 16
"""So many calls before and behind the first one that is open are looked at."""
CONTEXT = 4
"""Fewer calls than these do not tell which was to come."""


@dataclass(frozen=True, kw_only=True)
class Break:
    """`rank` came with `call` where one in lane `due` was to come; `how` its calls depart, of which `count` are concerned.

    `lanes` are those of the calls that are concerned.
    """

    rank: int
    how: How
    count: int
    call: Call
    due: Lane
    lanes: tuple[Lane, ...]


def broken(recording: Recording, meeting: Meeting, first_open: Call) -> Break | None:
    """The last call, near the first open one, that is not what followed the last time; None where all are as before."""
    rank = first_open.rank
    calls = recording.ranks[rank]
    lanes = {lane: number for number, lane in enumerate(calls.columns)}
    merged = sorted(
        (column.order[place], lanes[lane], place)
        for lane, column in calls.columns.items()
        for place in range(max(0, len(column) - PAST), len(column))
    )
    named = list(lanes)
    tokens = [number << 32 | meeting.alike(calls.columns[named[number]].kind[place]) for _, number, place in merged]
    here = recording.column(first_open).order[first_open.place]
    at = next((place for place, one in enumerate(merged) if one[0] == here), len(merged))
    for place in range(min(len(tokens), at + BEHIND) - 1, max(0, at - BEFORE), -1):
        ahead = to_come(tokens[:place], FAR, CONTEXT)
        if ahead and ahead[0] != tokens[place] and not _again(tokens, place):
            how, count = compared(ahead, tokens[place : place + FAR], eq)
            _, number, where = merged[place]
            return Break(
                rank=rank,
                how=how,
                count=count,
                call=Call(rank, named[number], where),
                due=named[ahead[0] >> 32],
                lanes=tuple(dict.fromkeys(named[token >> 32] for token in ahead[:count])),
            )
    return None


def _again(tokens: list[int], place: int) -> bool:
    """Whether this call follows those before it elsewhere too: then it is a way that the rank goes, if rarely."""
    turn = tokens[max(0, place - CONTEXT) : place + 1]
    length = len(turn)
    return any(tokens[at : at + length] == turn for at in range(len(tokens) - length + 1) if at + length - 1 != place)
