"""The dumps of one job's ranks, with what is missing of them: what the other parts of this package match."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

from dtprobe.diagnose.case import Artifact
from dtprobe.readers.artifact import Problem, ReaderError, one_line
from dtprobe.readers.flight_calls import read_calls
from dtprobe.readers.flight_columns import DONE, STARTED, Column, Kind, Lane, RankCalls, Tables

DEFAULT = "default_pg"
SYNCHRONISING = (
    *(
        "all_reduce",
        "allreduce",
        "all_gather",
        "allgather",
        "reduce_scatter",
        "all_to_all",
        "alltoall",
        "barrier",
        "_all_gather_base",
    ),
    *("_reduce_scatter_base", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce_barrier", "_allgather_base"),
)
"""No rank leaves these before all have entered."""
NOT_READ = "dumps of the flight recorder were not read"
MOST_RANKS = 1 << 20
"""A group with a rank beyond this is no group."""
_TRAILING = re.compile(r"([0-9]{1,7})(?:\.[A-Za-z]\w*)?$")


@dataclass(frozen=True, eq=False, slots=True)
class Group:
    """A process group: two groups of one name and different members are two. `members` are sorted.

    There is one object of each group in a recording: with thousands of members, comparing and hashing them would take long.
    """

    name: str
    members: tuple[int, ...]


class Call(NamedTuple):
    """One call of a rank: its lane, its place in the lane's column."""

    rank: int
    lane: Lane
    place: int


@dataclass
class Recording:
    """Everything that the dumps say, by rank.

    `unread` are ranks of which a file is there that could not be read, with the reason; `absent` those of which there is none.
    """

    ranks: dict[int, RankCalls]
    tables: Tables
    world_size: int
    unread: dict[int, str]
    absent: tuple[int, ...]
    missing: tuple[str, ...]
    hosts: Mapping[int, str] = field(default_factory=dict)
    _members: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    _users: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _groups: dict[tuple[int, str], Group] = field(default_factory=dict)
    _same: dict[tuple[str, int], list[tuple[tuple[int, ...], Group]]] = field(default_factory=dict)
    _made: dict[tuple[str, tuple[int, ...]], Group] = field(default_factory=dict)
    _used: dict[Group, list[int]] = field(default_factory=dict)
    _world: tuple[int, ...] = ()

    def kind(self, call: Call) -> Kind:
        return self.tables.kinds[self.column(call).kind[call.place]]

    def column(self, call: Call) -> Column:
        return self.ranks[call.rank].columns[call.lane]

    def seq(self, call: Call) -> int:
        return self.column(call).seq[call.place]

    def state(self, call: Call) -> int:
        return self.column(call).state[call.place]

    def site(self, call: Call) -> str:
        return self.tables.sites[self.column(call).site[call.place]]

    def created(self, call: Call) -> int:
        return self.column(call).created[call.place]

    def members(self, rank: int, group: str) -> tuple[int, ...]:
        """Who belongs to a group, as this rank sees it, in the order of their ranks within it.

        Where its dump does not say (gloo): the world for the default group, else who has calls of a group of this name.
        """
        key = rank, group
        if key not in self._members:
            calls = self.ranks[rank]
            told = calls.groups.get(group)
            if told is None and calls.described.get(group) == DEFAULT:
                self._world = self._world or tuple(range(self.world_size))
                told = self._world
            self._members[key] = told if told is not None else self._using(group)
        return self._members[key]

    def knows_members(self, rank: int, group: str) -> bool:
        """Whether the members of a group are told, and not only seen."""
        calls = self.ranks[rank]
        return calls.groups.get(group) is not None or calls.described.get(group) == DEFAULT

    def described(self, rank: int, group: str) -> str:
        """`default_pg`, or `mesh_tp (group 17)`."""
        text = self.ranks[rank].described.get(group, "")
        return text if text == DEFAULT else f"{text} (group {group})" if text and text != "undefined" else f"group {group}"

    def group(self, rank: int, name: str) -> Group:
        """The group that a rank means by a name."""
        key = rank, name
        if key not in self._groups:
            members = self.members(rank, name)
            same = self._same.setdefault((name, id(members)), [])  # ranks that tell the same members share them
            if not same:
                ordered = tuple(sorted(members))
                known = self._made.setdefault((name, ordered), Group(name, ordered))
                same.append((members, known))
            self._groups[key] = same[0][1]
        return self._groups[key]

    def groups(self) -> Mapping[Group, Sequence[int]]:
        """Every group of which collectives are recorded, with the ranks that recorded them."""
        if not self._used:
            for rank, calls in self.ranks.items():
                for lane in calls.columns:
                    if not lane.p2p:
                        self._used.setdefault(self.group(rank, lane.group), []).append(rank)
        return self._used

    def ends(self, rank: int, lane: Lane) -> tuple[int, int] | None:
        """Source and destination of a point-to-point lane as ranks of the world; None where the group's members are not known."""
        members = self.members(rank, lane.group)
        if max(lane.src, lane.dst) >= len(members):
            return (lane.src, lane.dst) if not self.knows_members(rank, lane.group) else None
        return members[lane.src], members[lane.dst]

    def last(self, rank: int, group: str) -> int | None:
        """The number of the last collective that the rank entered in a group, 0 for none; None where its dump does not tell."""
        calls = self.ranks[rank]
        column = calls.columns.get(Lane(group))
        seen = column.seq[-1] if column is not None and len(column) else None
        if calls.cut:
            return None
        status = calls.status.get(group)
        if status is not None:
            return max(status.enqueued, seen or 0)
        return seen if seen is not None else None if calls.wrapped else 0

    def open_calls(self, rank: int) -> list[Call]:
        """What the rank has called and not finished, in the order of its calls."""
        found = []
        for lane, column in self.ranks[rank].columns.items():
            for place in self._open(column):
                found.append((column.order[place], Call(rank, lane, place)))
        return [call for _, call in sorted(found, key=lambda one: one[0])]

    @staticmethod
    def _open(column: Column) -> Iterator[int]:
        place = column.state.find(0)
        started = column.state.find(1)
        first = min((one for one in (place, started) if one >= 0), default=len(column))
        return (one for one in range(first, len(column)) if column.state[one] != DONE)

    def blockers(self, rank: int, open_calls: Sequence[Call]) -> list[Call]:
        """In which calls the rank waits: those that have started, or, where its dump does not tell, the first that is open."""
        started = [call for call in open_calls if self.state(call) == STARTED]
        return started or list(open_calls[:1])

    def words(self, call: Call, state: bool = True) -> str:
        """`all_reduce seq 14 of default_pg [[1024]] Float, started; train.py:12 step`."""
        kind, lane = self.kind(call), call.lane
        name = kind.op
        if lane.p2p:
            name = f"{kind.op} {lane.dst}<-{lane.src}" if kind.op == "recv" else f"{kind.op} {lane.src}->{lane.dst}"
        number = f"p2p seq {self.seq(call)}" if lane.p2p else f"seq {self.seq(call)}"
        text = f"{name} {number} of {self.described(call.rank, lane.group)}"
        if kind.shapes:
            text += f" {kind.shapes} {','.join(dict.fromkeys(kind.dtypes or ()))}".rstrip()
        if state:
            text += f", {('not completed', 'started, not completed', 'completed')[self.state(call)]}"
        site = self.site(call)
        return f"{text}; {site}" if site else text

    def _using(self, group: str) -> tuple[int, ...]:
        if group not in self._users:
            users = [rank for rank, calls in self.ranks.items() if any(lane.group == group for lane in calls.columns)]
            self._users[group] = tuple(sorted(users))
        return self._users[group]


@dataclass(slots=True)
class Dump:
    """What became of one dump: its calls, or none and `why` (empty where a problem says it for many dumps at once)."""

    artifact: Artifact
    calls: RankCalls | None = None
    why: str = ""
    problems: list[Problem] = field(default_factory=list)


def dumps_of(artifacts: Sequence[Artifact]) -> list[Artifact]:
    """The dumps among the artifacts."""
    return [one for one in artifacts if one.kind == "flight-recorder"]


def read(artifact: Artifact, tables: Tables) -> Dump:
    """Read one dump."""
    found = Dump(artifact)
    problems: list[Problem] = []
    try:
        found.calls = read_calls(artifact.path, tables, artifact.name, problems)
    except ReaderError as error:
        found.why = one_line(str(error).replace(str(artifact.path), artifact.name))
        return found
    found.problems = [Problem(artifact.name, one.kind, one.text) for one in problems]
    if artifact.measured is not None:
        found.calls.move(artifact.placed_ns)
    return found


def gather(artifacts: Sequence[Artifact], problems: list[Problem]) -> Recording | None:
    """Read all dumps among the artifacts, one at a time; None where there is none. What cannot be read becomes a problem."""
    tables = Tables()
    return joined(artifacts, (read(one, tables) for one in dumps_of(artifacts)), tables, problems)


def joined(artifacts: Sequence[Artifact], dumps: Iterable[Dump], tables: Tables, problems: list[Problem]) -> Recording | None:
    """The recording of dumps that are read one after the other, in the order of the artifacts, as they are asked for."""
    ranks: dict[int, RankCalls] = {}
    unread: dict[int, str] = {}
    lost: set[int] = set()
    hosts: dict[int, str] = {}
    nameless: list[tuple[Artifact, RankCalls]] = []
    for dump in dumps:
        artifact, calls = dump.artifact, dump.calls
        rank = rank_named(artifact)
        if calls is None:
            if dump.why:
                problems.append(Problem(artifact.name, "unreadable", dump.why))
            if rank is not None and dump.why:
                unread[rank] = f"its dump {artifact.name} cannot be read"
            elif rank is not None:
                lost.add(rank)
            continue
        problems += dump.problems
        if rank is None:
            nameless.append((artifact, calls))
        elif rank not in ranks or _better(calls, ranks[rank]):
            ranks[rank] = calls
        if rank is not None and artifact.host:
            hosts[rank] = artifact.host
    for artifact, calls in nameless:
        place = _place(calls, {*ranks, *lost})
        if place is None:
            problems.append(Problem(artifact.name, "incomplete", "nothing tells which rank wrote this dump: it was left out"))
        else:
            ranks[place] = calls
    if not ranks and not unread and not lost:
        return None
    unread = dict.fromkeys(lost, NOT_READ) | unread
    unread = {rank: why for rank, why in unread.items() if rank not in ranks}
    for rank in _damaged(artifacts, dumps_of(artifacts)):
        if rank not in ranks:
            unread.setdefault(rank, "its dump is empty or no dump")
    world_size = _world_size(ranks, unread)
    ranks = {rank: ranks[rank] for rank in sorted(ranks) if rank < world_size}
    absent = tuple(rank for rank in range(world_size) if rank not in ranks and rank not in unread)
    missing = [f"rank {rank}: {why}" for rank, why in sorted(unread.items()) if why != NOT_READ]
    if lost := {rank for rank, why in unread.items() if why == NOT_READ}:
        missing.append(f"rank{'s' * (len(lost) > 1)} {spans(sorted(lost))}: {NOT_READ}")
    missing += [f"rank {rank}: its flight recorder's dump {calls.name} is cut" for rank, calls in ranks.items() if calls.cut]
    if absent:
        missing.append(f"no flight recorder dump of rank{'s' * (len(absent) > 1)} {spans(absent)}")
    return Recording(ranks, tables, world_size, unread, absent, tuple(missing), hosts)


def rank_named(artifact: Artifact) -> int | None:
    """The rank by the artifact's name: as intake found it, else the number at the name's end (any prefix may be configured)."""
    if artifact.rank is not None:
        return artifact.rank
    match = _TRAILING.search(PurePosixPath(artifact.name).name)
    return int(match[1]) if match else None


def spans(ranks: Sequence[int]) -> str:
    """`3`, `1, 4`, `8-15, 20`."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(
        str(low) if low == high else f"{low}-{high}" if high > low + 1 else f"{low}, {high}" for low, high in found
    )


def _better(one: RankCalls, other: RankCalls) -> bool:
    """Of two dumps of a rank: the whole one, the newer one, the one with more in it."""
    return (not one.cut, max(one.last_ns, one.dumped_ns), one.size) > (
        not other.cut,
        max(other.last_ns, other.dumped_ns),
        other.size,
    )


def _place(calls: RankCalls, others: set[int]) -> int | None:
    """The one rank that belongs to all groups of the dump, beside those that have dumps of their own."""
    told = [set(members) for members in calls.groups.values() if members]
    possible = set.intersection(*told) - others if told else set()
    return possible.pop() if len(possible) == 1 else None


def _damaged(artifacts: Sequence[Artifact], dumps: Sequence[Artifact]) -> Iterator[int]:
    """Ranks of empty or unreadable files that are called as the dumps are."""
    stems = {_TRAILING.sub("", PurePosixPath(one.name).name) for one in dumps}
    for one in artifacts:
        name = PurePosixPath(one.name).name
        if one.kind in ("empty", "binary", "refused") and _TRAILING.search(name) and _TRAILING.sub("", name) in stems:
            rank = rank_named(one)
            if rank is not None:
                yield rank


def _world_size(ranks: Mapping[int, RankCalls], unread: Mapping[int, str]) -> int:
    sizes = [
        (calls.described.get(group) == DEFAULT, max(members) + 1)
        for calls in ranks.values()
        for group, members in calls.groups.items()
        if members and max(members) < MOST_RANKS
    ]
    told = [size for is_default, size in sizes if is_default]
    if told:
        return max(told)
    listed = [size for _, size in sizes]
    return max([*(rank + 1 for rank in ranks), *(rank + 1 for rank in unread), *listed])
