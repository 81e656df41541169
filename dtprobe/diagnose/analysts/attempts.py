"""Tries that workers recorded: whose error came first, who ended well while others waited, who never came back from one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dtprobe.diagnose import seen
from dtprobe.diagnose.analysts.units import sent_within_collectives
from dtprobe.diagnose.case import Case, Finding, quote
from dtprobe.diagnose.facts.ends import ends
from dtprobe.diagnose.seen.observed import Observation, Try

ANALYST = "attempts"
RAISED, LEFT, SHORT, SENDING, PARTIAL, FORKED = 0.72, 0.7, 0.72, 0.75, 0.65, 0.6
FOR_EVER_NS = 3_000_000_000
_DIRECTION = re.compile(r"ms for (send|recv) operation to complete")
_LATER_GROUP = re.compile(r"wait timeout after \d+ ?ms, keys: \S*/(?P<group>[1-9]\w*)//(?:cpu|cuda)//\d+/(?P<awaited>\d+)\b")
"""Gloo's addresses of one rank of a group in the store; group 0 is the default one."""
_MISMATCH = "Detected mismatch between collectives"
_PEER = re.compile(
    r"(?i)connection (?:closed|reset|refused|was)|closed by peer|reset by peer|broken pipe|timed? ?out|read bytes|socket|unreachable|"
    r"remote process|network error|application timeout|wait timeout|DistNetworkError|DistStoreError|nccl|recv(?:Value|Vector)?\b|store"
)
"""Words of a rank that met a peer's trouble, not one of its own."""
_TIMEOUT = re.compile(r"(?i)timed? ?out")
_GONE = re.compile(r"(?i)closed by peer|reset by peer|broken pipe|connection was closed")
SOON_NS = 5_000_000_000


def analyse(case: Case) -> Iterator[Finding]:
    """Findings where ranks recorded tries."""
    found = seen.of(case).tries
    yield from _forked(seen.of(case).observations, found)
    failed = sorted((one for one in found if one.error and one.ended_ns is not None), key=lambda one: one.ended_ns or 0)
    if not failed:
        return
    if not sent_within_collectives(case):
        yield from _sending(failed)
    yield from _partial(failed)
    if len({one.rank for one in found}) < 2:
        return
    yield from _raised(failed)
    yield from _left(case, found, failed)
    yield from _short(found, failed)


def _forked(observed: Sequence[Observation], found: Sequence[Try]) -> Iterator[Finding]:
    """A child of a rank began a try and never came back, while its parent went on."""
    lost = [one for one in found if one.ended_ns is None and one.pid is not None]
    for one in lost:
        # the parent is the older process, with the smaller number; after a restart the newer one goes on
        after = [
            each
            for each in observed
            if each.rank == one.rank
            and each.t_ns > one.begun_ns + FOR_EVER_NS
            and each.pid is not None
            and each.pid < (one.pid or 0)
        ]
        if after:
            yield Finding(
                mode="fork-after-init",
                analyst=ANALYST,
                likelihood=FORKED,
                because=f"A child of rank {one.rank} (process {one.pid}) began {one.what} and never came back, while the rank went on.",
                first=one.rank if len({each.rank for each in lost}) == 1 else "all",
                suspects=tuple(sorted({each.rank for each in lost})),
                at_ns=one.begun_ns,
                evidence=(quote(one.line, "cause"), quote(after[0].line, "confirm")),
                not_proven="that the child was forked and used the parent's group",
            )
            return


def _sending(failed: Sequence[Try]) -> Iterator[Finding]:
    """Several ranks timed out in nothing but sends: each of them sent first."""
    ways: dict[int, set[str]] = {}
    for one in failed:
        if found := _DIRECTION.search(one.text):
            ways.setdefault(one.rank, set()).add(found[1])
    senders = sorted(rank for rank, way in ways.items() if way == {"send"})
    if len(senders) < 2:
        return
    lines = {one.rank: one.line for one in failed if one.rank in senders and "for send operation" in one.text}
    only = len(senders) == len(ways)
    yield Finding(
        mode="send-send-deadlock",
        analyst=ANALYST,
        likelihood=SENDING if only else SENDING - 0.1,
        because=f"Ranks {', '.join(map(str, senders))} all timed out in a send: each sends before it receives.",
        suspects=tuple(senders),
        at_ns=failed[0].ended_ns,
        evidence=tuple(quote(line, "cause") for line in list(lines.values())[:3]),
        not_proven="which of them should receive first",
    )


def _partial(failed: Sequence[Try]) -> Iterator[Finding]:
    """A later group's start waited for the address of a member that never came to make it."""
    waits = [(one, found) for one in failed if (found := _LATER_GROUP.search(one.text))]
    if not waits:
        return
    waiting = {one.rank for one, _found in waits}
    awaited = {int(found["awaited"]) for _one, found in waits} - waiting
    yield Finding(
        mode="new-group-misuse",
        analyst=ANALYST,
        likelihood=PARTIAL,
        because=f"Rank {min(waiting)} made group {waits[0][1]['group']} and waited for member {waits[0][1]['awaited']}, which never made it.",
        first=min(awaited) if len(awaited) == 1 else None,
        suspects=tuple(sorted(awaited or waiting)),
        at_ns=waits[0][0].ended_ns,
        evidence=tuple(quote(one.line, "cause") for one, _found in waits[:2]),
        not_proven="whether it made no group or one with other members",
    )


def _raised(failed: Sequence[Try]) -> Iterator[Finding]:
    first = failed[0]
    alike = {
        one.rank for one in failed if one.what == first.what and one.error == first.error and one.text[:60] == first.text[:60]
    }
    if _PEER.search(f"{first.error}: {first.text}") or _MISMATCH in first.text or len(alike) > 1:
        return
    after = [one for one in failed[1:] if one.rank != first.rank and _PEER.search(f"{one.error}: {one.text}")]
    if not after:
        return
    yield Finding(
        mode="python-exception-one-rank",
        analyst=ANALYST,
        likelihood=RAISED,
        because=f"Rank {first.rank} raised {first.error} in {first.what}, before any other rank failed.",
        first=first.rank,
        suspects=(first.rank,),
        at_ns=first.ended_ns,
        evidence=(quote(first.line, "cause"), quote(after[0].line, "effect")),
    )


def _left(case: Case, found: Sequence[Try], failed: Sequence[Try]) -> Iterator[Finding]:
    """Peers saw the connection close at once; a rank began a try, never ended it, and no launcher tells that it failed."""
    gone = next((one for one in failed if _GONE.search(one.text)), None)
    told = {end.rank if end.rank is not None else end.local_rank for end in ends(case)}
    if gone is None or any(_TIMEOUT.search(one.text) and (one.ended_ns or 0) < (gone.ended_ns or 0) for one in failed):
        return
    lost = {one.rank: one for one in found if one.ended_ns is None and one.what == gone.what}
    lost = {rank: one for rank, one in lost.items() if rank not in told and not any(each.rank == rank for each in failed)}
    if len(lost) == 1 and told:
        ((rank, one),) = lost.items()
        yield Finding(
            mode="peer-exited-early",
            analyst=ANALYST,
            likelihood=LEFT,
            because=f"Rank {rank} began {one.what} and never ended it; its peers' connections closed, and its launcher tells of no failure of it.",
            first=rank,
            suspects=(rank,),
            at_ns=gone.ended_ns,
            evidence=(quote(one.line, "cause"), quote(gone.line, "effect")),
            not_proven="that it ended with success",
        )


def _short(found: Sequence[Try], failed: Sequence[Try]) -> Iterator[Finding]:
    """A rank ended the same unit of work without an error, while another one waited in it until its time-out."""
    for late in failed:
        if not _TIMEOUT.search(late.text):
            continue
        well = [
            one
            for one in found
            if one.what == late.what
            and one.rank != late.rank
            and not one.error
            and one.ended_ns is not None
            and late.begun_ns - SOON_NS <= one.begun_ns
            and one.ended_ns < (late.ended_ns or 0)
            and (late.ended_ns or 0) - one.ended_ns > ((late.ended_ns or 0) - late.begun_ns) // 2
        ]
        fewer = [one for one in well if any(_fewer(one, late, name) for name in ("batches", "steps", "iterations", "samples"))]
        if fewer:
            one = fewer[0]
            yield Finding(
                mode="uneven-dataloader-desync",
                analyst=ANALYST,
                likelihood=SHORT,
                because=f"Rank {one.rank} ended {one.what} with fewer batches than rank {late.rank}, which waited in it until its time-out.",
                first=one.rank,
                suspects=tuple(sorted({each.rank for each in fewer})),
                at_ns=one.ended_ns,
                evidence=(quote(one.line, "cause"), quote(late.line, "effect")),
            )
            return


def _fewer(one: Try, other: Try, name: str) -> bool:
    mine, theirs = one.fields.get(name), other.fields.get(name)
    return isinstance(mine, int | float) and isinstance(theirs, int | float) and mine < theirs
