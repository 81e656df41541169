"""Whom an event is about: the rank that it names by number, process, GPU or host, not merely the one that printed it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from dtprobe.diagnose.case import Case, Event, First
from dtprobe.diagnose.who import same_host

DEVICE_ERRORS = ("cuda-launch-failure", "cuda-illegal-access", "cuda-ecc", "cuda-nvlink", "cuda-misaligned")
"""What a process says when its GPU has failed."""
SECOND_HAND = "NCCL"
"""NCCL's word of a CUDA error is often about a peer's GPU."""
FOLLOWS = 40
"""NCCL's warning and the exception that it becomes stand this near each other."""
_REMOTE = "remote process exited"
_SAYS_RANK = re.compile(r"(?i)\b(?:global_?)?rank ?[=: ] ?(?P<rank>\d{1,6})\b")
_OBJECT = re.compile(r"\b(?:node|pod)[/ ](?P<host>[a-z0-9][a-z0-9.-]*[a-z0-9])\b(?= |:|$|,)")
_NUMBERED = re.compile(r"^(?P<stem>.*?)(?P<number>\d+)$")


def rank_of(event: Event, case: Case) -> int | None:
    """The rank that this event is about; None where nothing tells."""
    named = event.fields
    if "rank" in named and named["rank"].isdigit():
        return int(named["rank"])
    host = host_of(event, case)
    if "gpu" in named and (seat := case.who.at_gpu(named["gpu"], host)):
        return seat.rank
    pid = int(named["pid"]) if "pid" in named else None if "gpu" in named else event.line.pid
    if pid is not None and (seat := case.who.at_pid(pid, host)):
        return seat.rank
    if "gpu" in named or "pid" in named:
        return None if pid is None else next((rank for find in _FINDERS if (rank := find(case, pid)) is not None), None)
    if event.rank is not None:
        return event.rank
    return _follower(case, event) if event.line.pid is not None else None


def host_of(event: Event, case: Case) -> str | None:
    """The host that it is about: named in it, of its artifact, or one of the job's hosts that the artifact's name holds."""
    if event.host:
        return event.host
    if (named := _OBJECT.search(event.line.text)) and re.search(r"[\d-]", named["host"]):
        return named["host"]
    sections = case.who.sections.get(event.line.artifact.name, ())
    if (pod := next((one.pod for one in reversed(sections) if one.first <= event.line.number), None)) is not None:
        return pod
    words = set(
        re.split(r"[^\w-]+|(?<=[a-z])[-_](?=[a-z])|\b(?:dmesg|kern|messages|journal|syslog)[-_]", event.line.artifact.name)
    )
    return next((seat.host for seat in case.who.seats if seat.host and seat.host in words), None)


def _by_launch_order(case: Case, pid: int) -> int | None:
    """The place of a process among those that the old launcher killed, which it does in the order of their ranks on its host."""
    order = list(dict.fromkeys(int(event.fields["subprocess"]) for event in case.of("launch-killing")))
    files = {event.line.artifact.name for event in case.of("launch-killing")}
    return order.index(pid) if pid in order and len(files) == 1 else None


def _only_unseated(case: Case, _pid: int) -> int | None:
    """The only rank whose process is not known, for a process that is no other rank's."""
    size = case.who.world_size
    if size is None or not 1 < size <= 1 << 20:
        return None
    left = set(range(size)) - {seat.rank for seat in case.who.seats if seat.pid is not None}
    return left.pop() if len(left) == 1 else None


def _said_by(case: Case, pid: int) -> int | None:
    """The rank that a process gave as its own in its lines."""
    said = {int(found["rank"]) for line in case.lines if line.pid == pid and (found := _SAYS_RANK.search(line.text))}
    return said.pop() if len(said) == 1 else None


_FINDERS = (_by_launch_order, _only_unseated, _said_by)


def _follower(case: Case, event: Event) -> int | None:
    """The rank whose exception follows a warning of NCCL from a process that is nobody's as far as known."""
    after = [
        one.rank
        for one in case.of("nccl-error")
        if one.line.artifact.name == event.line.artifact.name
        and 0 < one.line.number - event.line.number <= FOLLOWS
        and _REMOTE not in one.line.text
    ]
    return after[0] if after else None


def device_rank(case: Case, host: str | None) -> int | None:
    """The one rank that said that its own GPU failed, or said so first, for an event that names a GPU which is nobody's as far as known."""
    said = [event for event in case.of(*DEVICE_ERRORS) if SECOND_HAND not in event.line.text]
    ranks = [rank_of(event, case) for event in in_order(said)]
    known = list(dict.fromkeys(rank for rank in ranks if rank is not None and _fits(case, rank, host)))
    timed = all(event.t_ns is not None for event in said)
    return known[0] if len(known) == 1 or (known and timed) else None


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
    everybody = len(ranks) > 1 and world(case) <= set(ranks)
    if scope == "all" or (scope in ("rank", "host") and everybody):
        return "all", ()
    if scope == "alike" and (len(ranks) > 1 or not ranks):
        return "all", ()
    if scope == "nobody":
        return None, ()
    if scope == "store":
        return 0, (0,)
    if scope == "peer":
        others = tuple(world(case) - set(ranks))
        return _one(others if len(others) == 1 else ())
    if not ranks and scope in ("host", "rank"):
        return _of_hosts(events, case, scope)
    return _one(ranks or (absent(case) if scope == "first" else ()))


def absent(case: Case) -> tuple[int, ...]:
    """The ranks that never came to the store, where their number is told and the ranks before them were seen to come."""
    counted = case.of("store-clients-missing")
    told = next((event.fields for event in counted if "arrived" in event.fields), None)
    if told is None or case.who.several:
        return ()  # the clients of a launcher's store are nodes
    missing = range(int(told["arrived"]), min(int(told["expected"]), 1 << 20))
    return tuple(missing) if not case.who.seen & set(missing) else ()


def ranks_on(host: str, case: Case) -> tuple[int, ...]:
    """The ranks of a host; where none is known, those that its number tells if hosts were filled in the order of their numbers."""
    if ranks := case.who.on(host):
        return ranks
    seats = {line.host: line.rank for line in reversed(case.lines) if line.host and line.rank is not None}
    at_home = [seats[pod] for pod, others in case.who.pods.items() if host in others and pod in seats]
    if at_home:
        return tuple(sorted(at_home))
    if (own := seats.get(host)) is not None:
        return (own,)
    seats = {PurePath(name).parts[0].split(".")[0]: rank for name, rank in case.who.files} | seats
    mine = _NUMBERED.match(host)
    known = {
        int(found["number"]): min(case.who.on(name) or (rank,))
        for name, rank in seats.items()
        if mine and (found := _NUMBERED.match(name)) and found["stem"] == mine["stem"]
    }
    if mine is None or len(known) < 2:
        return ()
    (low, first), (high, last) = sorted(known.items())[0], sorted(known.items())[-1]
    each, rest = divmod(last - first, high - low)
    if rest or each < 1 or any(rank != first + each * (number - low) for number, rank in known.items()):
        return ()
    start = first + each * (int(mine["number"]) - low)
    return tuple(range(start, start + each)) if start >= 0 else ()


def _one(ranks: Sequence[int]) -> tuple[First, tuple[int, ...]]:
    return (ranks[0], (ranks[0],)) if ranks else (None, ())


def _of_hosts(events: Sequence[Event], case: Case, scope: str) -> tuple[First, tuple[int, ...]]:
    hosts = list(dict.fromkeys(host for event in events if (host := host_of(event, case))))
    ranks = tuple(dict.fromkeys(rank for host in hosts for rank in ranks_on(host, case)))
    if scope == "rank":
        return _one(ranks if len(ranks) == 1 else ())
    everywhere = {seat.host for seat in case.who.seats if seat.host} | set(case.who.pods)
    everywhere |= {line.host for line in case.lines if line.host and line.rank is not None}
    if ranks and world(case) and world(case) <= set(ranks):
        return "all", ()
    if not ranks and len(everywhere) <= 1 and not case.who.several:
        return "all", ()
    return _one(sorted(ranks))
