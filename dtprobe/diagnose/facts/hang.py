"""Who waits for whom: the ranks that timed out in a collective, and the ranks that are not where these wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from dtprobe.diagnose.case import Case, Line
from dtprobe.diagnose.facts.membership import members as members_of
from dtprobe.diagnose.facts.raised import raised
from dtprobe.diagnose.facts.timeouts import DEFAULT_GROUP, Status, Timeout, Waits, waits

Kind = Literal["absent", "frozen", "late", "halfway", "other-operation", "other-size", "other-place", "nobody", "p2p", "some"]
RAGGED = frozenset({"SCATTER", "GATHER", "ALLTOALL", "ALLTOALL_BASE"})
"""Operations in which ranks may bring unlike sizes by right."""
Key = Callable[[Timeout], Hashable]
P2P = frozenset({"SEND", "RECV", "COALESCED", "RECVANYSOURCE", "UNKNOWN"})
_P2P_CALLS = {"send": "SEND", "isend": "SEND", "recv": "RECV", "irecv": "RECV", "batch_isend_irecv": "COALESCED"}
FEW = 0.5
"""More than this part of the ranks cannot be the ones that are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Ranks `waiting` in one collective of `group`, and how the `odd` ones differ.

    `kind`: they are `absent` from it, `frozen` so that even their watchdogs were late, `late` by more than the others waited, in a broadcast that
    the others have left (`halfway`), in another operation, bring another size, wait at another line of the program, or there is
    `nobody` who differs; `p2p` for sends and receives; `some` where fewer ranks than half were heard of.
    `crossed`: other ranks wait in another group at the same time. `calls` are the point-to-point calls that gave up, where no
    time-out of NCCL names them.
    """

    kind: Kind
    group: str
    waiting: tuple[int, ...]
    odd: tuple[int, ...] = ()
    began_ns: int | None = None
    timeouts: tuple[Timeout, ...] = ()
    line: Line | None = None
    crossed: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()

    def of(self, rank: int) -> Timeout | None:
        """The time-out of this rank in this hang."""
        return next((one for one in self.timeouts if one.rank == rank), None)

    @property
    def typical(self) -> Timeout | None:
        """The time-out of a rank that waits where most wait."""
        return next((one for one in self.timeouts if one.rank not in self.odd), None)


@lru_cache(maxsize=2)
def world(case: Case) -> frozenset[int]:
    """Every rank of the job that anything names; up to the world size where that is known."""
    joined = waits(case)
    named = set(case.who.seen) | joined.waiting() | {one.rank for one in joined.statuses}
    named |= {seat.rank for seat in case.who.seats}
    named |= {int(event.fields["from_rank"]) for event in case.of("dump-signal")}
    named |= {int(event.fields[name]) for event in case.of("nccl-unique-id-missing") for name in ("waiting", "awaited")}
    size = case.who.world_size or 0
    top = max([size - 1, *named], default=-1)
    return frozenset(range(top + 1)) if 0 <= top < 65536 else frozenset(named)


@lru_cache(maxsize=2)
def hang(case: Case) -> Hang | None:
    """The earliest hang that the time-outs tell of; None where none does."""
    joined = waits(case)
    if joined.timeouts:
        names = sorted(joined.by_group, key=lambda name: _order(joined.by_group[name]))
        found = [_in_group(case, joined, name) for name in names]
        best = next((one for one in found if one.kind not in ("some",)), found[0])
        crossed = tuple(one.group for one in found if one is not best and not set(one.waiting) & set(best.waiting))
        return replace(best, crossed=crossed)
    if joined.gloo:
        return _gloo(case, joined)
    return _first_meeting(case)


def _first_meeting(case: Case) -> Hang | None:
    """Ranks that ask another one for the id of their communicator, which that one never came to make."""
    asked = case.of("nccl-unique-id-missing")
    if not asked or len({event.fields["key"] for event in asked}) > 1:
        return None
    waiting = {int(event.fields["waiting"]) for event in asked}
    silent = world(case) - waiting
    awaited = {int(event.fields["awaited"]) for event in asked}
    odd = silent if len(silent) <= max(1, FEW * len(world(case))) else silent & awaited
    return Hang(
        kind="absent" if odd else "some",
        group=DEFAULT_GROUP,
        waiting=tuple(sorted(waiting)),
        odd=tuple(sorted(odd)),
        line=asked[0].line,
    )


def _order(timeouts: Sequence[Timeout]) -> tuple[int, int]:
    began = [one.began_ns for one in timeouts if one.began_ns is not None]
    return (min(began, default=0), timeouts[0].line.number)


def _in_group(case: Case, joined: Waits, group: str) -> Hang:
    timeouts = joined.by_group[group]
    members = world(case) if group == DEFAULT_GROUP else members_of(joined, group, world(case))
    waiting = {one.rank for one in timeouts}
    began = [one.began_ns for one in timeouts if one.began_ns is not None]

    def result(kind: Kind, odd: Iterable[int] = ()) -> Hang:
        named = tuple(sorted(odd))
        return Hang(
            kind=kind,
            group=group,
            waiting=tuple(sorted(waiting - set(named))) or tuple(sorted(waiting)),
            odd=named,
            began_ns=min(began, default=None),
            timeouts=timeouts,
            line=timeouts[0].line,
        )

    if all(one.op in P2P for one in timeouts):
        return result("p2p")
    silent = members - waiting
    behind = {rank for rank in silent if _left_out(joined.status(rank, group), timeouts)}
    if behind:
        return result("absent", behind)
    if silent and len(silent) <= FEW * len(members):
        return result("absent", silent)
    frozen = {one.rank for one in timeouts if one.frozen}
    if frozen and len(frozen) <= FEW * len(members):
        return result("frozen", frozen)
    late = _late(timeouts)
    if late and len(late) <= FEW * len(members):
        return result("late", late)
    if odd := _halfway(timeouts, joined):
        return result("halfway", odd)
    if odd := _minority(timeouts, joined, lambda one: one.op):
        return result("other-operation", odd)
    if odd := _minority(timeouts, joined, lambda one: None if one.op in RAGGED else one.numel_in):
        return result("other-size", odd)
    if odd := _minority(timeouts, joined, lambda one: one.seq):
        return result("other-operation", odd)
    if odd := _minority(timeouts, joined, lambda one: one.place):
        return result("other-place", odd)
    if silent:
        return result("some")
    return result("nobody")


def _late(timeouts: Sequence[Timeout]) -> set[int]:
    """Ranks that began to wait in the same collective when those that began first had given up."""
    began = [(one.began_ns, one.limit_ms, one) for one in timeouts if one.began_ns is not None and one.limit_ms]
    if not began:
        return set()
    first_ns, limit_ms, first = min(began, key=lambda item: item[0])
    return {
        one.rank
        for began_ns, _, one in began
        if began_ns - first_ns > limit_ms * 1_000_000 and (one.seq, one.op) == (first.seq, first.op)
    }


def _halfway(timeouts: Sequence[Timeout], joined: Waits) -> set[int]:
    """Ranks that wait in a broadcast which the others have left, where all enqueued as many calls: none left one out."""
    numbers = {one.seq for one in timeouts if one.seq is not None}
    if len(numbers) < 2:
        return set()
    states = [joined.status(one.rank, one.group) for one in timeouts]
    if any(state is None or state.enqueued < max(numbers) for state in states):
        return set()
    return {one.rank for one in timeouts if one.seq == min(numbers) and one.op == "BROADCAST"}


def _left_out(status: Status | None, timeouts: Sequence[Timeout]) -> bool:
    """This rank is done with everything that it enqueued, and enqueued less than the others wait for."""
    wanted = min((one.seq for one in timeouts if one.seq is not None), default=None)
    return status is not None and status.idle and wanted is not None and status.enqueued < wanted


def _minority(timeouts: Sequence[Timeout], joined: Waits, key: Key) -> set[int]:
    """The ranks that differ in this from most; of two halves those that enqueued less, then those that bring less."""
    seen = Counter(value for one in timeouts if (value := key(one)) is not None)
    if len(seen) < 2:
        return set()
    most = max(seen.values())
    leading = [value for value, count in seen.items() if count == most]
    if len(leading) == 1:
        return {one.rank for one in timeouts if key(one) not in (None, leading[0])}
    enqueued = {value: _least(timeouts, joined, value, key) for value in leading}
    numbers = {value: one for value, one in enqueued.items() if one is not None}
    if len(set(numbers.values())) > 1:
        guilty = min(numbers, key=lambda value: numbers[value])
    else:
        sizes = {value: min((one.numel_in or 0 for one in timeouts if key(one) == value), default=0) for value in leading}
        guilty = min(leading, key=lambda value: (sizes[value], -min(one.rank for one in timeouts if key(one) == value)))
    return {one.rank for one in timeouts if key(one) == guilty}


def _least(timeouts: Sequence[Timeout], joined: Waits, value: object, key: Key) -> int | None:
    found = [status.enqueued for one in timeouts if key(one) == value and (status := joined.status(one.rank, one.group))]
    return min(found, default=None)


def _gloo(case: Case, joined: Waits) -> Hang:
    """Gloo's time-outs name neither operation nor peers: who waits is known, who does not is the rest."""
    waiting = {one.rank for one in joined.gloo if one.rank is not None}
    places = {one.rank: one.where for one in raised(case) if one.rank in waiting and one.effect}
    silent = world(case) - waiting
    line = joined.gloo[0].line
    given_up = [one for one in raised(case) if one.rank in waiting and one.effect]
    kind: Kind = "nobody"
    odd: set[int] = set()
    if silent and waiting and len(silent) <= FEW * len(world(case)):
        kind, odd = "absent", set(silent)
    elif len(set(places.values())) > 1:
        counts = Counter(places.values())
        most = counts.most_common(2)
        if most[0][1] > most[1][1]:
            kind, odd = "other-place", {rank for rank, place in places.items() if rank is not None and place != most[0][0]}
    elif silent:
        kind = "some"
    elif given_up and all(_p2p_call(one.frames) for one in given_up):
        kind = "p2p"
    calls = tuple(call for one in given_up if (call := _p2p_call(one.frames)))
    return Hang(kind=kind, group=DEFAULT_GROUP, waiting=tuple(sorted(waiting)), odd=tuple(sorted(odd)), line=line, calls=calls)


def _p2p_call(frames: Sequence[str]) -> str | None:
    """`SEND` or `RECV` where the innermost calls are point to point."""
    names = [one.rpartition(" in ")[2] for one in frames]
    return next((_P2P_CALLS[name] for name in reversed(names) if name in _P2P_CALLS), None)
