"""Groups that ranks hold the other way round, and a rank that took another branch: silent, and told by names and lines of code."""

from __future__ import annotations

from collections.abc import Iterator

from dtprobe.diagnose.analysts.collectives.findings import quote
from dtprobe.diagnose.analysts.collectives.recording import Recording, spans
from dtprobe.diagnose.analysts.collectives.sites import Detour, Exchanged, detours, exchanged
from dtprobe.diagnose.case import Case, Finding

ANALYST = "exchanges"
SWAPPED, BRANCHED = 0.85, 0.7


def analyse(case: Case) -> Iterator[Finding]:
    """The first exchange and the first detour of the recorded calls; nothing without dumps."""
    recording = case.recording
    if recording is None:
        return
    swap = next(exchanged(recording), None)
    if swap is not None:
        yield _swapped(recording, swap)
    detour = min(detours(recording), key=lambda one: recording.created(one.theirs), default=None)
    if detour is not None:
        yield _branched(recording, detour)


def _swapped(recording: Recording, one: Exchanged) -> Finding:
    who = f"rank{'s' * (len(one.ranks) > 1)} {spans(one.ranks)}"
    by = f"are called {one.names[0]} and {one.names[1]} there" if one.names else "are called from each other's lines there"
    return Finding(
        mode="group-order-swap",
        analyst=ANALYST,
        likelihood=SWAPPED,
        because=f"{who} holds groups {one.one} and {one.other} the other way round than rank {spans(one.others)}: they {by}, and calls of the one "
        "met calls of the other",
        first=None if one.tie else one.ranks[0],
        suspects=tuple(sorted({*one.ranks, *one.others})) if one.tie else one.ranks,
        evidence=(
            quote(recording, one.theirs, "cause", "called "),
            quote(recording, one.ours, "cause", "called "),
        ),
        at_ns=min(recording.created(one.theirs), recording.created(one.ours)),
        not_proven="Which order of new_group was meant." if one.tie else "",
    )


def _branched(recording: Recording, one: Detour) -> Finding:
    extra = one.how == "added"
    what = (
        f"made {one.count} call{'s' * (one.count > 1)} more" if extra else f"left out {one.count} call{'s' * (one.count > 1)}"
    )
    return Finding(
        mode="data-dependent-branch-desync" if extra else "collective-skipped",
        analyst=ANALYST,
        likelihood=BRANCHED,
        because=f"rank {one.rank} {what} than the others at seq {recording.seq(one.theirs)} of group {one.group.name}, after the lines of all ranks "
        "had agreed: from there on its calls meet calls of other lines",
        first=one.rank,
        suspects=(one.rank,),
        host=recording.hosts.get(one.rank),
        evidence=(
            quote(recording, one.theirs, "cause", "called "),
            quote(recording, one.expected, "confirm", "called "),
        ),
        at_ns=recording.created(one.theirs),
        not_proven="What the branch depends on.",
    )
