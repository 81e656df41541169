"""Whom an event is about: the rank that it names by number, process or GPU, not merely the one that printed it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dtprobe.diagnose.case import Case, Event, First
from dtprobe.diagnose.who import same_host

DEVICE_ERRORS = ("cuda-launch-failure", "cuda-illegal-access", "cuda-ecc", "cuda-nvlink", "cuda-misaligned")
"""What a process says when its GPU has failed."""
SECOND_HAND = "NCCL"
"""NCCL's word of a CUDA error is often about a peer's GPU."""


def rank_of(event: Event, case: Case) -> int | None:
    """The rank that this event is about; None where nothing tells."""
    named = event.fields
    if "rank" in named and named["rank"].isdigit():
        return int(named["rank"])
    if "gpu" in named and (seat := case.who.at_gpu(named["gpu"], event.host)):
        return seat.rank
    for pid in (named.get("pid"), None if "gpu" in named or "pid" in named else event.line.pid):
        if pid is not None and (seat := case.who.at_pid(int(pid), event.host)):
            return seat.rank
    if "gpu" in named or "pid" in named:
        return unseated(case, event)
    return event.rank


def unseated(case: Case, event: Event) -> int | None:
    """The only rank whose process is not known, where the event names a process that is no other rank's."""
    size = case.who.world_size
    if "pid" not in event.fields or size is None or size < 2:
        return None
    placed = {seat.rank for seat in case.who.seats if seat.pid is not None}
    left = set(range(size)) - placed
    return left.pop() if len(left) == 1 else None


def device_rank(case: Case, host: str | None) -> int | None:
    """The rank that first said that its own GPU failed, for an event that names a GPU which is nobody's as far as known."""
    said = [event for event in case.of(*DEVICE_ERRORS) if SECOND_HAND not in event.line.text]
    ranks = [rank_of(event, case) for event in in_order(said)]
    known = [rank for rank in ranks if rank is not None and _fits(case, rank, host)]
    return known[0] if known else None


def _fits(case: Case, rank: int, host: str | None) -> bool:
    seat = case.who.of(rank)
    return host is None or seat is None or seat.host is None or same_host(seat.host, host)


def in_order(events: Iterable[Event]) -> list[Event]:
    """By time where all of them tell one, else as they were read."""
    ordered = list(events)
    if all(event.t_ns is not None for event in ordered):
        ordered.sort(key=lambda event: event.t_ns or 0)
    return ordered


def world(case: Case) -> frozenset[int]:
    """All ranks of the job, as far as known."""
    size = case.who.world_size
    return frozenset(range(size)) if size is not None and size <= 1 << 20 else case.who.seen


def whom(events: Sequence[Event], case: Case, scope: str) -> tuple[First, tuple[int, ...]]:
    """The rank that failed first after these events of one mode, in their order, and those to look at."""
    ranks = tuple(dict.fromkeys(rank for event in events if (rank := rank_of(event, case)) is not None))
    printers = {(event.line.artifact.name, event.line.rank, event.line.pid, event.host) for event in events}
    everybody = len(ranks) > 1 and world(case) <= set(ranks)
    if scope == "all" or (scope == "rank" and everybody):
        return "all", ()
    if scope == "alike" and (len(ranks) > 1 or not ranks):
        return "all", ()
    if scope == "store":
        return 0, (0,)
    if scope == "peer":
        others = world(case) - set(ranks)
        return _one(tuple(others)) if len(others) == 1 else (None, ())
    if scope == "host" and not ranks:
        return _of_hosts(events, case, len(printers))
    return _one(ranks or (absent(case) if scope == "first" else ()))


def absent(case: Case) -> tuple[int, ...]:
    """The ranks that never came to the store, where their number is told and the ranks before them were seen to come."""
    counted = case.of("store-clients-missing")
    told = next((event.fields for event in counted if "arrived" in event.fields), None)
    if told is None:
        return ()
    missing = range(int(told["arrived"]), min(int(told["expected"]), 1 << 20))
    return tuple(missing) if not case.who.seen & set(missing) else ()


def _one(ranks: Sequence[int]) -> tuple[First, tuple[int, ...]]:
    return (ranks[0], (ranks[0],)) if ranks else (None, ())


def _of_hosts(events: Sequence[Event], case: Case, printers: int) -> tuple[First, tuple[int, ...]]:
    hosts = list(dict.fromkeys(event.host for event in events if event.host))
    ranks = tuple(rank for host in hosts for rank in case.who.on(host))
    everywhere = {seat.host for seat in case.who.seats if seat.host}
    if ranks and world(case) <= set(ranks):
        return "all", ()
    if not ranks and (len(everywhere) <= 1 or printers > 1):
        return "all", ()
    return _one(tuple(sorted(ranks)))
