"""Units of work that ranks recorded, against the collectives that they called in them.

A rank that called more in one unit than its peers, and than itself in the units before, took another branch there, though nothing raised and
every call met one of the same size. Ranks that all came to one broadcast and there all timed out sending each took itself for the root.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from dtprobe.diagnose import seen
from dtprobe.diagnose.analysts.collectives.findings import quote as quote_call
from dtprobe.diagnose.analysts.collectives.kinds import base
from dtprobe.diagnose.analysts.collectives.recording import Call, Recording, spans
from dtprobe.diagnose.case import Case, Finding, quote
from dtprobe.diagnose.facts.units import calls_in, rounds
from dtprobe.diagnose.seen.observed import Try

ANALYST = "units"
BRANCHED, LEFT_OUT, ROOTS = 0.9, 0.75, 0.85
SETTLED = 2
"""So many units in which all ranks called alike come before the one that differs."""
_SENDING = re.compile(r"ms for send operation to complete")


def analyse(case: Case) -> Iterator[Finding]:
    """Findings where ranks recorded both; nothing without either."""
    recording, tries = case.recording, seen.of(case).tries
    if recording is None or len({one.rank for one in tries}) < 2:
        return
    for _what, repeated in rounds(tries):
        yield from _branched(recording, repeated)
        yield from _roots(recording, repeated)


def sent_within_collectives(case: Case) -> bool:
    """Whether the recorders show that those who timed out in a send were in a collective: then it was not theirs to order."""
    recording = case.recording
    failed = [one for one in seen.of(case).tries if _SENDING.search(one.text)]
    return recording is not None and bool(failed) and all(calls_in(recording, one) for one in failed)


def _branched(recording: Recording, repeated: Sequence[Mapping[int, Try]]) -> Iterator[Finding]:
    """The first unit in which one rank called more or fewer than the others, which called as in every unit before."""
    usual: int | None = None
    for number, unit in enumerate(repeated):
        if not all(rank in recording.ranks for rank in unit) or any(one.error or one.ended_ns is None for one in unit.values()):
            return
        calls = {rank: [call for call in calls_in(recording, one) if call.lane.group] for rank, one in unit.items()}
        counts = {rank: len(own) for rank, own in calls.items()}
        if len(set(counts.values())) == 1 and usual in (None, next(iter(counts.values()))):
            usual = next(iter(counts.values()))
            continue
        odd = [rank for rank, count in counts.items() if count != usual]
        if number >= SETTLED and usual and len(odd) == 1 and calls[odd[0]]:
            yield _odd(recording, unit, calls, odd[0], usual)
        return


def _odd(recording: Recording, unit: Mapping[int, Try], calls: Mapping[int, Sequence[Call]], rank: int, usual: int) -> Finding:
    more = len(calls[rank]) > usual
    other = next(one for one in unit if one != rank)
    return Finding(
        mode="data-dependent-branch-desync" if more else "collective-skipped",
        analyst=ANALYST,
        likelihood=BRANCHED if more else LEFT_OUT,
        because=f"rank {rank} called {len(calls[rank])} collectives in one {unit[rank].what} where the others called {usual}, as all did in each one "
        "before: from there on its calls meet calls of another place",
        first=rank,
        suspects=(rank,),
        at_ns=unit[rank].begun_ns,
        evidence=(
            quote(unit[rank].line, "cause"),
            *(quote_call(recording, call, "cause", "called ") for call in calls[rank][:3]),
            quote(unit[other].line, "confirm"),
        ),
        not_proven="What the branch depends on: its lines of code are not recorded.",
    )


def _roots(recording: Recording, repeated: Sequence[Mapping[int, Try]]) -> Iterator[Finding]:
    """All ranks came to one broadcast, and two or more of them timed out sending."""
    for unit in repeated:
        senders = [one for one in unit.values() if _SENDING.search(one.text)]
        if not any(one.error for one in unit.values()):
            continue
        last = {rank: calls[-1] for rank, one in unit.items() if (calls := calls_in(recording, one))}
        alike = {(base(recording.kind(call).op), recording.seq(call), call.lane) for call in last.values()}
        if len(senders) > 1 and len(alike) == 1 and next(iter(alike))[0] == "broadcast" and set(last) == set(unit):
            ranks = tuple(sorted(one.rank for one in senders))
            yield Finding(
                mode="broadcast-root-mismatch",
                analyst=ANALYST,
                likelihood=ROOTS,
                because=f"all ranks called the same broadcast, and ranks {spans(ranks)} each timed out sending: each acts as its root",
                suspects=ranks,
                at_ns=min(one.begun_ns for one in senders),
                evidence=(
                    *(quote(one.line, "cause") for one in senders[:3]),
                    *(quote_call(recording, last[rank], "confirm", "called ") for rank in ranks[:2]),
                ),
                not_proven="Which of them was meant to be the root: it is not recorded.",
            )
        return  # only the first failure of a job counts: what is tried after it meets its wreck
