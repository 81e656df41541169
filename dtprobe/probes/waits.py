"""Who waits for whom, and who is the cause: from the ranks' records of collectives and what each rank does.

Pure functions. A rank in an open operation waits for the members of its group that did not enter it, or entered another one
at the same place. Following these, a chain ends at ranks that wait for nobody (they work, or are stuck by themselves), or it
closes upon itself (crossed groups, a skipped call), or all have entered and nothing moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from dtprobe.probes.liveness import Finding, Life
from dtprobe.probes.stall import Operation, Records, Stall

CONTEXT = 8
"""So many earlier calls, at most, tell which call was to come."""
SAME_SIZES = (
    *("all_reduce", "broadcast", "reduce"),
    *("ncclAllReduce", "ncclBroadcast", "ncclReduce", "ncclAllGather", "ncclReduceScatter"),
)
"""All members hand over tensors of the same size."""
MOVING = (Life.WORKS, Life.FILES)
LOADS_S = 10.0
"""So long may the host of a rank in an operation on a GPU be loading kernels, which looks like spinning on a stream. The first steps of two
ranks did for 3 to 4 s (two H200, seven jobs at a time)."""
LAST = 0.25
LAST_S = 5.0
"""An operation that has less than this left of its timeout, and less than this share of it, is as good as lost: the evidence is
taken now. Longer than the pause between two judgements, and than what taking it lasts."""


class Kind(StrEnum):
    """Why a collective cannot complete."""

    STOPPED = "stopped"
    ENDED = "ended"
    GIL = "gil-held"
    ASLEEP = "asleep"
    BLOCKED = "blocked"
    MISMATCH = "mismatch"
    MUTUAL = "mutual"
    SYMMETRIC = "symmetric"
    TIMEOUT = "timeout"
    """It may complete, but its own timeout is about to end it."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """An operation that cannot complete. `suspects` is None for all ranks alike; `ranks` says of each rank what it does."""

    kind: Kind
    operation: Operation
    waiting: tuple[int, ...]
    suspects: tuple[int, ...] | None
    because: str
    ranks: Mapping[int, str]

    @property
    def key(self) -> tuple[str, int]:
        return self.operation.group, self.operation.seq

    def same(self, other: Hang) -> bool:
        """A second look that says the same."""
        return (self.key, self.kind, self.suspects) == (other.key, other.kind, other.suspects)


@dataclass(frozen=True, kw_only=True)
class Wait:
    """An operation that is open for long, and why that is no hang. Not `settled`: it has not been looked at for long enough."""

    operation: Operation
    because: str
    settled: bool = True


class Place(NamedTuple):
    """A call, as all ranks that make it together know it."""

    group: str
    name: str
    sizes: str


def named(operation: Operation) -> str:
    """`all_reduce seq 6 of default_pg`; a group that was given no description goes by its number."""
    described = operation.group_desc not in ("", "undefined")
    return (
        f"{_plain(operation.name)} seq {operation.seq} of {operation.group_desc if described else f'group {operation.group}'}"
    )


def judge(
    stall: Stall,
    records: Mapping[int, Records],
    findings: Mapping[int, Finding],
    gil: Mapping[int, str],
    *,
    fresh: Collection[int],
    world_size: int,
    quiet_s: float,
    patience_s: float,
    now_ns: int,
    inside: Mapping[int, float] | None = None,
) -> Hang | Wait:
    """Whether `stall` is a hang.

    `gil` are ranks whose interpreter lock is held by a thread that does nothing, in words; `fresh` those whose records are of
    now; `quiet_s` is how long a rank must have been without progress to count as stuck, `patience_s` how long one may only sleep.
    `inside` are ranks whose host is in a call to NCCL, with the seconds since: there it makes communicators and connections and loads kernels,
    so that processor time is work, up to `patience_s`.
    """
    graph = _Graph(records, fresh, world_size)
    waiting, reach, free = graph.follow(stall)
    operation = stall.operation
    concerned = sorted({*waiting, *reach})
    said = {rank: _said(rank, graph, findings, gil) for rank in sorted({*concerned, *findings})}

    def hang(kind: Kind, suspects: Sequence[int] | None, because: str) -> Hang:
        everyone = suspects is not None and len(suspects) > 1 and set(suspects) >= set(range(world_size))
        return Hang(
            kind=kind,
            operation=operation,
            waiting=stall.waiting,
            suspects=None if suspects is None or everyone else tuple(sorted(suspects)),
            because=because,
            ranks=said,
        )

    members = graph.members(operation) or graph.users(operation.group)
    timeout_s = operation.timeout_ms / 1e3
    left_s = timeout_s - (now_ns - operation.created_ns) / 1e9
    hopeless = _hopeless({*concerned, *members}, reach, findings, gil, left_s, patience_s)
    if hopeless is not None:
        return hang(*hopeless, _listed(hopeless[1], said))
    late = left_s <= min(LAST_S, timeout_s * LAST)
    soon = f"{max(0.0, left_s):.1f} s are left of its timeout of {timeout_s:g} s"
    unknown = [rank for rank in free if rank not in findings]
    if unknown:
        because = f"rank {_ranks(unknown)} is not on this host: nothing is known of it"
        return hang(Kind.TIMEOUT, unknown, f"{soon}; {because}") if late else Wait(operation=operation, because=because)
    # Also one that is in an operation of another group: it may have begun that in the background.
    alive = [rank for rank in sorted(reach) if rank in findings and findings[rank].alive]
    if _by_device(operation):
        alive = [rank for rank in alive if findings[rank].life is not Life.WORKS or graph.waits_in(rank) is None]
    if not reach:
        works = [rank for rank in waiting if findings[rank].life in MOVING]
        if _by_device(operation):
            loads = now_ns - operation.created_ns < min(LOADS_S, timeout_s / 2) * 1e9
            works = [] if late else [rank for rank in works if loads or (inside or {}).get(rank, patience_s) < patience_s]
        alive += works
    if alive:
        because = _listed(alive, said)
        return hang(Kind.TIMEOUT, alive, f"{soon}; {because}") if late else Wait(operation=operation, because=because)
    blocked = [rank for rank in free or concerned if findings[rank].life is Life.BLOCKED]
    restless = [rank for rank in blocked if findings[rank].quiet_s < quiet_s]
    if restless:
        return Wait(operation=operation, because=_listed(restless, said), settled=False)
    if free:
        return hang(Kind.BLOCKED, free, _listed(free, said))
    others = [rank for rank in graph.others(operation) if rank in reach]
    if others or reach - set(waiting):
        kind = Kind.MISMATCH if others else Kind.MUTUAL
        odd = _odd_ones(concerned, graph, operation)
        calls = "; ".join(f"rank {_ranks(ranks)}: {call}" for call, ranks in graph.calls(concerned).items())
        return hang(kind, odd, f"they wait for each other ({calls})")
    left = members - set(waiting)
    if members and left:
        return hang(
            Kind.SYMMETRIC, None, f"rank {_ranks(waiting)} is in it and nothing moves, rank {_ranks(sorted(left))} has left it"
        )
    return hang(Kind.SYMMETRIC, None, f"all {len(waiting)} ranks of the group entered it, none leaves and nothing moves")


class _Graph:
    """The records of all ranks, as a graph of waits."""

    def __init__(self, records: Mapping[int, Records], fresh: Collection[int], world_size: int) -> None:
        self._records = records
        self._world_size = world_size
        self._open = {
            rank: sorted((one for one in records[rank].operations if one.open), key=lambda one: one.created_ns)
            for rank in records
            if rank in fresh
        }

    def follow(self, stall: Stall) -> tuple[list[int], set[int], list[int]]:
        """Ranks that wait in it; all that they wait for, directly or not; and those of these that wait for nobody."""
        reach: set[int] = set()
        ahead = [stall.operation]
        seen = set()
        while ahead:
            operation = ahead.pop()
            if (operation.group, operation.seq) in seen:
                continue
            seen.add((operation.group, operation.seq))
            for rank in self.targets(operation):
                reach.add(rank)
                ahead += self._open.get(rank, ())
        free = sorted(rank for rank in reach if not self._open.get(rank))
        return list(stall.waiting), reach, free

    def targets(self, operation: Operation) -> set[int]:
        """Whom a rank in this operation waits for."""
        members = self.members(operation)
        if members is None:  # nobody knows who else belongs to the group: it may be anyone
            members = frozenset(range(self._world_size)) | self.users(operation.group)
        missing = {rank for rank in members if self._last(rank, operation.group) < operation.seq}
        return missing | set(self.others(operation))

    def members(self, operation: Operation) -> frozenset[int] | None:
        """As the backend told them; the world for the default group; who used it, where a call of it has completed; else None.

        Who did not answer just now may be a member too.
        """
        for one in self._records.values():
            if told := one.members.get(operation.group):
                return told
        if operation.group_desc == "default_pg":
            return frozenset(range(self._world_size))
        for one in self._records.values():
            if any(call.group == operation.group and not call.open for call in one.operations):
                return self.users(operation.group) | (frozenset(range(self._world_size)) - self._open.keys())
        return None

    def users(self, group: str) -> frozenset[int]:
        return frozenset(rank for rank, one in self._records.items() if one.last(group) is not None)

    def others(self, operation: Operation) -> list[int]:
        """Ranks that called something else at the same place."""
        found = []
        for rank, one in self._records.items():
            here = one.at(operation.group, operation.seq)
            if here is not None and _differ(here, operation):
                found.append(rank)
        return found

    def waits_in(self, rank: int) -> Operation | None:
        return next(iter(self._open.get(rank, ())), None)

    def calls(self, ranks: Collection[int]) -> dict[str, list[int]]:
        """Where ranks wait, in words."""
        found: dict[str, list[int]] = {}
        for rank in sorted(ranks):
            call = self.waits_in(rank)
            found.setdefault(f"{named(call)} {call.sizes}" if call else "in no collective", []).append(rank)
        return found

    def history(self, rank: int, operation: Operation) -> list[Place]:
        """The calls of a rank in their order, up to that at the operation's place, else up to the first that is open."""
        calls = sorted(self._records[rank].operations, key=lambda one: one.created_ns) if rank in self._records else []
        here = self._records[rank].at(operation.group, operation.seq) if rank in self._records else None
        until = here or self.waits_in(rank)
        kept = calls[: calls.index(until) + 1] if until is not None else calls
        return [Place(one.group, one.name, one.sizes) for one in kept]

    def last_call(self, rank: int) -> Operation | None:
        calls = self._records[rank].operations if rank in self._records else ()
        return max(calls, key=lambda one: one.created_ns, default=None)

    def _last(self, rank: int, group: str) -> int:
        last = self._records[rank].last(group) if rank in self._records else None
        return last.seq if last is not None else -1


def _hopeless(
    ranks: Collection[int],
    awaited: Collection[int],
    findings: Mapping[int, Finding],
    gil: Mapping[int, str],
    left_s: float,
    patience_s: float,
) -> tuple[Kind, list[int]] | None:
    """Ranks that cannot come, by the surest reason. One that sleeps cannot before it wakes, which may be known to be too late."""
    known = {rank: findings[rank] for rank in sorted(ranks) if rank in findings}
    kinds = {
        Kind.STOPPED: [rank for rank, one in known.items() if one.life is Life.STOPPED],
        Kind.GIL: [rank for rank in known if rank in gil and rank in awaited],
        Kind.ENDED: [rank for rank, one in known.items() if one.life is Life.ENDED],
        Kind.ASLEEP: [
            rank
            for rank, one in known.items()
            if rank in awaited
            and one.life is Life.SLEEPS
            and (_asleep_for(one) > left_s or one.idle_s + _asleep_for(one) > patience_s)
        ],
    }
    return next(((kind, found) for kind, found in kinds.items() if found), None)


def _asleep_for(one: Finding) -> float:
    """How long it still sleeps for certain: only a sleep to a point in time tells."""
    return 0.0 if one.native_sleep else one.sleep_s or 0.0


def _by_device(operation: Operation) -> bool:
    """Its ranks may wait by spinning on a stream, which looks like work."""
    return operation.name.startswith("nccl:")


def _odd_ones(ranks: Collection[int], graph: _Graph, operation: Operation) -> list[int]:
    """Those whose call is not that of the majority; where that is a tie, whose call breaks the order of their earlier calls.

    All of them where neither decides.
    """
    groups: dict[str, list[int]] = graph.calls(ranks)
    sizes = Counter({call: len(some) for call, some in groups.items()}).most_common()
    if len(sizes) > 1 and sizes[0][1] > sizes[1][1]:
        return sorted(set(ranks) - set(groups[sizes[0][0]]))
    surprising = [rank for rank in sorted(ranks) if _breaks_the_order(graph.history(rank, operation))]
    return surprising if 0 < len(surprising) < len(ranks) else sorted(ranks)


def _breaks_the_order(calls: Sequence[Place]) -> bool:
    """Whether the last call is not the one that followed the last time that the calls before it were the same."""
    past = calls[:-1]
    for length in range(min(CONTEXT, len(past)), 0, -1):
        context = past[-length:]
        for place in range(len(past) - length - 1, -1, -1):
            if past[place : place + length] == context:
                return past[place + length] != calls[-1]
    return False


def _differ(one: Operation, other: Operation) -> bool:
    plain = _plain(one.name)
    return plain != _plain(other.name) or (plain in SAME_SIZES and one.sizes != other.sizes)


def _said(rank: int, graph: _Graph, findings: Mapping[int, Finding], gil: Mapping[int, str]) -> str:
    call, last = graph.waits_in(rank), graph.last_call(rank)
    parts = [f"waits in {named(call)}" if call else f"last called {named(last)}" if last else "called no collective"]
    if rank in gil:
        parts.insert(0, gil[rank])
    elif rank in findings and not (call and findings[rank].life is Life.BLOCKED):
        parts.insert(0, findings[rank].text)
    return ", ".join(parts)


def _listed(ranks: Sequence[int], said: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank}: {said[rank]}" for rank in ranks)


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def _plain(name: str) -> str:
    return name.rpartition(":")[2]
