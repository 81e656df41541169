"""Who waits for whom, in which call: a graph of ranks and calls over all groups and pairs, and what its shape says.

A rank waits in its open calls; a call waits for the members of its group that did not enter it, or that have it queued behind
another call. Following this, a chain ends at ranks that wait for nobody (they work, or are stuck by themselves), at ranks of which
nothing is known, or in a call that all have entered; or it closes upon itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dtprobe.diagnose.analysts.collectives.kinds import Meeting, base
from dtprobe.diagnose.analysts.collectives.recording import SYNCHRONISING, Call, Group, Recording
from dtprobe.diagnose.graphs import strongly_connected
from dtprobe.readers.flight_columns import DONE, STARTED, Lane

Reason = Literal["absent", "behind", "differs"]
"""Why a call waits for a rank: it never called it, it has it queued behind another, it called something else in its place."""


class Meet(NamedTuple):
    """A place where ranks meet: a collective by its number, or one side of a point-to-point call (`rank`, its place in the lane)."""

    group: Group
    seq: int
    lane: Lane | None = None
    rank: int = -1


@dataclass
class Held:
    """What is known of one meeting: who waits in it, for whom and why, and of whom nobody knows."""

    calls: dict[int, Call] = field(default_factory=dict)
    awaits: dict[int, Reason] = field(default_factory=dict)
    unknown: list[int] = field(default_factory=list)


class Graph:
    """The waits of all ranks. `stale` are ranks whose dump is older than what others completed with their help."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.meeting = Meeting(recording.tables.kinds)
        self.stale = frozenset(_stale(recording))
        self.open: dict[int, list[Call]] = {}
        self.blockers: dict[int, list[Meet]] = {}
        self.held: dict[Meet, Held] = {}
        for rank in recording.ranks:
            calls = [] if rank in self.stale else recording.open_calls(rank)
            self.open[rank] = calls
            self.blockers[rank] = []
            for call in recording.blockers(rank, calls):
                meet = self.meet(call)
                self.held.setdefault(meet, Held()).calls[rank] = call
                self.blockers[rank].append(meet)
        for meet, held in self.held.items():
            if meet.lane is None:
                self._collective(meet, held)
            else:
                self._pair(meet, held)

    @property
    def waiting(self) -> list[int]:
        return [rank for rank, meets in self.blockers.items() if meets]

    @property
    def age_s(self) -> float | None:
        """For how long the longest waiting call is open; None where no dump stamps the time at which it was taken."""
        ages = []
        for rank, meets in self.blockers.items():
            for meet in meets:
                call = self.held[meet].calls[rank]
                if self.recording.state(call) == STARTED and self.recording.ranks[rank].dumped_ns:
                    ages.append((self.recording.ranks[rank].dumped_ns - self.recording.created(call)) / 1e9)
        return max(ages, default=None)

    def meet(self, call: Call) -> Meet:
        group = self.recording.group(call.rank, call.lane.group)
        if call.lane.p2p:
            return Meet(group, self.recording.seq(call), call.lane, call.rank)
        return Meet(group, self.recording.seq(call))

    def awaited(self, rank: int) -> Iterator[tuple[int, Meet, Reason]]:
        for meet in self.blockers[rank]:
            for other, reason in self.held[meet].awaits.items():
                yield other, meet, reason

    def _known(self, rank: int) -> bool:
        return rank in self.recording.ranks and rank not in self.stale

    def _collective(self, meet: Meet, held: Held) -> None:
        recording = self.recording
        lane = Lane(meet.group.name)
        kind = recording.kind(next(iter(held.calls.values())))
        for member in meet.group.members:
            if member in held.calls:
                continue
            last = recording.last(member, meet.group.name) if self._known(member) else None
            if last is None or recording.group(member, meet.group.name) is not meet.group:
                if not (self._known(member) and self._has(member, lane, meet.seq)):
                    held.unknown.append(member)
                continue
            if last < meet.seq:
                held.awaits[member] = "absent"
                continue
            column = recording.ranks[member].columns.get(lane)
            place = column.at(meet.seq) if column is not None else None
            if column is None or place is None or column.state[place] == DONE:
                continue
            other = recording.tables.kinds[column.kind[place]]
            held.awaits[member] = "behind" if other.op == kind.op else "differs"

    def _has(self, rank: int, lane: Lane, seq: int) -> bool:
        column = self.recording.ranks[rank].columns.get(lane)
        return column is not None and column.at(seq) is not None

    def _pair(self, meet: Meet, held: Held) -> None:
        lane, rank = meet.lane, meet.rank
        ends = self.recording.ends(rank, lane) if lane is not None else None
        if lane is None or ends is None:
            return
        peer = ends[1] if ends[0] == rank else ends[0]
        if peer == rank:
            return
        if not self._known(peer) or self.recording.ranks[peer].cut:
            held.unknown.append(peer)
            return
        call = self._partner(held.calls[rank], peer)
        if call is None:
            held.awaits[peer] = "absent"
            return
        if self.recording.state(call) == DONE:
            return  # the peer did its half: what keeps this one open is another part of its batch
        if call not in self.recording.blockers(peer, self.open[peer]):
            held.awaits[peer] = "behind"
        elif not self.meeting.same(self.recording.column(call).kind[call.place], self._kind(rank, held)):
            one, other = self.recording.kind(call), self.recording.kind(held.calls[rank])
            if one.ins is not None and other.ins is not None and sum(one.ins) != sum(other.ins):
                held.awaits[peer] = "differs"

    def _kind(self, rank: int, held: Held) -> int:
        call = held.calls[rank]
        return self.recording.column(call).kind[call.place]

    def counterpart(self, meet: Meet) -> Call | None:
        """The peer's open call that pairs with a point-to-point call."""
        held = self.held[meet]
        ends = self.recording.ends(meet.rank, meet.lane) if meet.lane is not None else None
        if ends is None:
            return None
        peer = ends[1] if ends[0] == meet.rank else ends[0]
        return self._partner(held.calls[meet.rank], peer)

    def _partner(self, call: Call, peer: int) -> Call | None:
        """The peer's half of a point-to-point call: of whole histories the one with the same count between the two, else that of their open calls."""
        recording, lane = self.recording, call.lane
        column = recording.ranks[peer].columns.get(lane) if peer in recording.ranks else None
        if column is not None and not (recording.ranks[call.rank].wrapped or recording.ranks[peer].wrapped):
            return Call(peer, lane, call.place) if call.place < len(column) else None
        mine = [one for one in self.open.get(call.rank, ()) if one.lane == lane]
        theirs = [one for one in self.open.get(peer, ()) if one.lane == lane]
        place = mine.index(call)
        return theirs[place] if place < len(theirs) else None

    def cycles(self) -> list[list[int]]:
        """Sets of ranks that wait for each other, directly or not: strongly connected, two ranks or more."""
        after: dict[int | Meet, Sequence[int | Meet]] = dict(self.blockers.items())
        after.update({meet: [rank for rank in held.awaits if rank in self.blockers] for meet, held in self.held.items()})
        found = [[one for one in part if isinstance(one, int)] for part in strongly_connected(after, after)]
        return [sorted(part) for part in found if len(part) > 1]

    def idle(self) -> dict[int, list[tuple[Meet, Reason]]]:
        """Ranks that are waited for and wait for nobody, with the calls that wait for them."""
        found: dict[int, list[tuple[Meet, Reason]]] = {}
        for meet, held in self.held.items():
            for rank, reason in held.awaits.items():
                if not self.blockers.get(rank):
                    found.setdefault(rank, []).append((meet, reason))
        return found

    def blind(self) -> list[Meet]:
        """Calls that wait for nobody that is known, but perhaps for a rank of which nothing is known."""
        return [meet for meet, held in self.held.items() if held.unknown and not held.awaits]

    def short(self) -> list[tuple[Call, tuple[int, ...]]]:
        """Open calls, none of which is the first open one of its rank, that most members of their group have made and a few have not.

        With those few, the oldest call first.
        """
        found = []
        for group, ranks in self.recording.groups().items():
            lane = Lane(group.name)
            lasts = {rank: self.recording.last(rank, group.name) for rank in group.members if self._known(rank)}
            told = {rank: last for rank, last in lasts.items() if last is not None}
            least, most = min(told.values(), default=0), max(told.values(), default=0)
            few = tuple(rank for rank, last in told.items() if last == least)
            if least == most or len(few) * 2 >= len(told):
                continue
            for rank in ranks:
                column = self.recording.ranks[rank].columns[lane]
                place = column.at(least + 1) if rank in told else None
                if place is not None and column.state[place] != DONE:
                    found.append((Call(rank, lane, place), few))
                    break
        return sorted(found, key=lambda one: self.recording.created(one[0]))

    def entered(self) -> list[Meet]:
        """Calls that all their members have entered and none has left, the oldest first."""
        found = [
            meet
            for meet, held in self.held.items()
            if not held.awaits and not held.unknown and len(held.calls) > 1 and set(held.calls) >= set(meet.group.members)
        ]
        return sorted(found, key=lambda meet: min(self.recording.created(call) for call in self.held[meet].calls.values()))


def _stale(recording: Recording) -> Iterator[int]:
    """Ranks whose dump does not have a call that others completed, which they cannot without them."""
    for group, ranks in recording.groups().items():
        if not all(recording.knows_members(rank, group.name) for rank in ranks):
            continue
        lane = Lane(group.name)
        done = 0
        for rank in ranks:
            column = recording.ranks[rank].columns[lane]
            place = column.state.rfind(DONE)
            if place >= 0 and base(recording.tables.kinds[column.kind[place]].op) in SYNCHRONISING:
                done = max(done, column.seq[place])
        for rank in group.members:
            if rank in recording.ranks:
                last = recording.last(rank, group.name)
                if last is not None and last < done:
                    yield rank
