"""Communicators that were not made, or not by the ranks that should have: from NCCL's log and from stacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtprobe.diagnose import seen
from dtprobe.diagnose.case import Case, Finding, Line, quote
from dtprobe.diagnose.seen import Seen
from dtprobe.diagnose.seen.doing import Doing
from dtprobe.diagnose.seen.nccl import NcclProcess
from dtprobe.readers.nccl_log import Making

ANALYST = "nccl communicators"
STALE, APART, VERSIONS = 0.9, 0.75, 0.6
SHOWN = 4


@dataclass(frozen=True, slots=True)
class Open:
    """A rank that began to make a communicator and did not finish."""

    process: NcclProcess
    comm: str
    made: Making
    line: Line


def analyse(case: Case) -> Iterator[Finding]:
    """Restarts that met an old id, ids that only some have, versions that differ."""
    found = seen.of(case)
    open_ones = [Open(one, comm, made, line) for one in found.nccl for comm, (made, line) in one.begun().items()]
    stale = list(_stale(found.nccl, open_ones))
    yield from stale
    if not stale:
        yield from _apart(found, open_ones)
    yield from _versions(found.nccl, open_ones)


def _stale(processes: Sequence[NcclProcess], open_ones: Sequence[Open]) -> Iterator[Finding]:
    """After a restart, ranks make communicators of different ids, and one of them asks a port that nobody serves any more."""
    restarted = {
        rank for rank in {one.rank for one in processes} if rank is not None and sum(p.rank == rank for p in processes) > 1
    }
    earlier = _attempts(processes) > 1
    for one in open_ones:
        refused = [line for _address, why, line in one.process.refused if "refused" in why.lower()]
        others = [other for other in open_ones if other.comm != one.comm and other.made.nranks == one.made.nranks]
        others = [other for other in others if other.made.rank != one.made.rank]
        if not refused or not others or not (restarted or earlier):
            continue
        evidence = [quote(one.line, "cause"), quote(others[0].line, "cause"), quote(refused[0], "confirm")]
        suspects = sorted({rank for rank in (one.process.rank, others[0].process.rank) if rank is not None})
        yield Finding(
            mode="restart-stale-store",
            analyst=ANALYST,
            likelihood=STALE,
            because=f"After a restart rank {one.made.rank} joins communicator {one.comm} and rank {others[0].made.rank} makes {others[0].comm}: "
            f"the first read the id of the last attempt, whose root listens no more.",
            suspects=tuple(suspects),
            evidence=tuple(evidence),
            not_proven="why the attempt before the restart failed",
        )
        return


def _attempts(processes: Sequence[NcclProcess]) -> int:
    """How many processes of one device a host has seen: more than one are attempts after each other."""
    seats: dict[tuple[str, int], set[int]] = {}
    for one in processes:
        for made, _line in one.makings:
            seats.setdefault((one.host, made.device), set()).add(one.pid)
    by_world = max((len(pids) for pids in seats.values()), default=0)
    sizes = {made.nranks for one in processes for made, _line in one.makings}
    hosts = {one.host for one in processes}
    crowded = len(hosts) == 1 and bool(sizes) and len(processes) > max(sizes)
    return max(by_world, 2 if crowded else 1)


def _apart(found: Seen, open_ones: Sequence[Open]) -> Iterator[Finding]:
    """One rank makes a communicator whose id it has published, another still waits for an id: they make different ones."""
    making = {rank: one for rank, one in found.doing.items() if one.doing is Doing.MAKING}
    waiting = {
        rank: one
        for rank, one in found.doing.items()
        if one.doing is Doing.STORE and one.operation not in (None, "init_process_group")
    }
    if not making or not waiting:
        return
    first, other = next(iter(making.values())), next(iter(waiting.values()))
    evidence = [first.quote("cause"), other.quote("cause")]
    evidence += [quote(one.line, "confirm") for one in open_ones[:2]]
    yield Finding(
        mode="cross-communicator-deadlock",
        analyst=ANALYST,
        likelihood=APART,
        because=f"Rank {first.rank} makes a communicator and has published its id, rank {other.rank} waits for the id of another one: "
        "they enter groups in opposite orders.",
        suspects=tuple(sorted({*making, *waiting})),
        evidence=tuple(evidence),
        not_proven="which of the two orders was meant",
    )


def _versions(processes: Sequence[NcclProcess], open_ones: Sequence[Open]) -> Iterator[Finding]:
    versions: dict[str, list[NcclProcess]] = {}
    for one in processes:
        if one.version is not None:
            versions.setdefault(one.version[0], []).append(one)
    if len(versions) < 2 or not (open_ones or any(one.warnings for one in processes)):
        return
    fewest = min(versions.values(), key=len)
    ranks = sorted(one.rank for one in fewest if one.rank is not None)
    lines = [found[0].version[1] for found in versions.values() if found[0].version is not None]
    yield Finding(
        mode="nccl-version-mismatch",
        analyst=ANALYST,
        likelihood=VERSIONS,
        because=f"The ranks load different NCCL versions: {', '.join(sorted(versions))}.",
        first=ranks[0] if len(ranks) == 1 else None,
        suspects=tuple(ranks),
        evidence=tuple(quote(line, "cause") for line in lines[:SHOWN]),
        not_proven="that the difference is what failed: NCCL releases of one major version often work together",
    )
