"""Ranks whose own work takes longer, by what every rank recorded of its steps; and ranks that came after their peers had given up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from dtprobe.diagnose import seen
from dtprobe.diagnose.case import Case, Finding, quote
from dtprobe.diagnose.facts.units import calls_in, rounds
from dtprobe.diagnose.seen.observed import Try
from dtprobe.readers.artifact import as_float

ANALYST = "own pace"
SLOW, LATE = 0.8, 0.75
SLOWER = 1.5
"""The slow rank's middle step takes so many times the others' (as in `pace`)."""
STEADY = 0.8
"""In so many of the steps it is the slowest: batches of varying length make each rank the slowest now and then."""
FEWEST = 5
_WORK = re.compile(r"(?i)^(?:work|compute|own|busy|forward|backward|train)(?:_time)?_(?:s|ms|seconds)$")
_TIMED_OUT = re.compile(r"(?i)ms for recv operation to complete")
_GONE = re.compile(r"(?i)closed by peer|reset by peer|broken pipe")
AFTER_NS = 500_000_000


def analyse(case: Case) -> Iterator[Finding]:
    """At most one of each."""
    tries = seen.of(case).tries
    for _what, repeated in rounds(tries):
        yield from _slow(repeated)
        if repeated:
            yield from _late(case, repeated[0])


def _slow(repeated: Sequence[Mapping[int, Try]]) -> Iterator[Finding]:
    steps = [unit for unit in repeated if all(not one.error and _work(one) is not None for one in unit.values())]
    if len(steps) < FEWEST or len(steps[0]) < 2:
        return
    middles = {rank: median(_work(unit[rank]) or 0.0 for unit in steps) for rank in steps[0]}
    slow = max(middles, key=lambda rank: middles[rank])
    others = median(value for rank, value in middles.items() if rank != slow)
    slowest = sum(max(unit, key=lambda rank: _work(unit[rank]) or 0.0) == slow for unit in steps)
    if others <= 0 or middles[slow] < SLOWER * others or slowest < STEADY * len(steps):
        return
    other = next(rank for rank in middles if rank != slow)
    yield Finding(
        mode="straggler",
        analyst=ANALYST,
        likelihood=SLOW,
        because=f"rank {slow}'s own work takes {middles[slow] / others:.1f} times as long as its peers', and longest in {slowest} of {len(steps)} steps",
        first=slow,
        suspects=(slow,),
        host=steps[-1][slow].line.host,
        evidence=(quote(steps[-1][slow].line, "cause"), quote(steps[-1][other].line, "confirm")),
        not_proven="whether its host, its device or its share of the work is to blame",
    )


def _work(one: Try) -> float | None:
    return next(
        (value for name, field in one.fields.items() if _WORK.match(name) and (value := as_float(field)) is not None), None
    )


def _late(case: Case, unit: Mapping[int, Try]) -> Iterator[Finding]:
    """Peers timed out receiving; a rank that did not came to its exchange after that, and found them gone."""
    timed_out = [one for one in unit.values() if _TIMED_OUT.search(one.text) and one.ended_ns is not None]
    gone = [one for one in unit.values() if _GONE.search(one.text) and one.ended_ns is not None]
    if (
        not timed_out
        or not gone
        or (case.recording is not None and any(calls_in(case.recording, one) for one in unit.values()))
    ):
        return
    gave_up = min(one.ended_ns or 0 for one in timed_out)
    late = [one for one in gone if (one.ended_ns or 0) - gave_up > AFTER_NS and one.begun_ns < gave_up]
    if len(late) != 1:
        return
    one = late[0]
    yield Finding(
        mode="straggler",
        analyst=ANALYST,
        likelihood=LATE,
        because=f"rank {one.rank} came {((one.ended_ns or 0) - gave_up) / 1e9:.1f} s after its peers had timed out receiving, and found their connections "
        "closed: it was late, and theirs were the first errors",
        first=one.rank,
        suspects=(one.rank,),
        at_ns=one.begun_ns,
        evidence=(quote(one.line, "cause"), *(quote(each.line, "effect") for each in timed_out[:2])),
        not_proven="what kept it: its own work, or an exchange that it waited for before",
    )
