"""Waits that nothing ends but the time-out of a collective, and exceptions that run into the cleanup's own collective."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dtprobe.diagnose import seen
from dtprobe.diagnose.analysts.collectives.findings import quote as quote_call
from dtprobe.diagnose.analysts.collectives.kinds import base
from dtprobe.diagnose.analysts.collectives.recording import Call, Recording
from dtprobe.diagnose.case import Case, Finding, quote
from dtprobe.diagnose.facts.units import calls_between
from dtprobe.diagnose.seen.observed import Observation, Try

ANALYST = "blocked"
CLEANUP, WAITED, SERVED = 0.85, 0.75, 0.85
NEAR_NS = 500_000_000
LEAST_NS = 1_000_000_000
"""A wait shorter than this is none."""
SOON_NS = 1_000_000_000
"""Who goes to the cleanup does so at once."""
_RAISED = re.compile(r"(?i)^(?:raised|exception|caught|error|failed)$")
_SIGNAL = re.compile(r"(?i)^(?:pressed|signal(?:led)?|sig(?:int|term|usr\d)|interrupt|ctrl[-_ ]?c)$")
_SERVED = re.compile(r"(?i)^(?:served|handled|handler|interrupted|stopping)$")
_CLOSING = ("barrier", "all_reduce_barrier", "monitored_barrier")


def analyse(case: Case) -> Iterator[Finding]:
    """Findings where ranks recorded what they did beside their flight recorders."""
    recording, found = case.recording, seen.of(case)
    if recording is None:
        return
    yield from _cleanup(recording, found.observations, found.tries)
    yield from _unending(recording, found.observations, found.tries)


def _cleanup(recording: Recording, observed: Sequence[Observation], tries: Sequence[Try]) -> Iterator[Finding]:
    """The first exception of all, after which its rank went at once into a barrier and stayed there until it failed, too."""
    raised = [one for one in observed if _RAISED.match(one.kind) and one.rank is not None]
    first = min(raised, key=lambda one: one.t_ns, default=None)
    if first is None or first.rank is None:
        return
    after = calls_between(recording, first.rank, first.t_ns, first.t_ns + SOON_NS)
    call = next((one for one in after if base(recording.kind(one).op) in _CLOSING), None)
    stuck = next(
        (
            one
            for one in tries
            if one.rank == first.rank
            and one.error
            and one.begun_ns < first.t_ns
            and (one.ended_ns or 0) - first.t_ns > LEAST_NS
        ),
        None,
    )
    if call is None or stuck is None:
        return
    what = first.fields.get("type") or first.fields.get("error") or "an exception"
    yield Finding(
        mode="cleanup-deadlock-after-exception",
        analyst=ANALYST,
        likelihood=CLEANUP,
        because=f"rank {first.rank} raised {what} and went on to a barrier at once, which waits for peers that are in another call; the exception "
        f"showed only after {((stuck.ended_ns or 0) - first.t_ns) / 1e9:.1f} s",
        first=first.rank,
        suspects=(first.rank,),
        at_ns=first.t_ns,
        evidence=(
            quote(first.line, "cause"),
            quote_call(recording, call, "cause", "called "),
            quote(stuck.line, "effect"),
        ),
        not_proven="Why it raised.",
    )


def _unending(recording: Recording, observed: Sequence[Observation], tries: Sequence[Try]) -> Iterator[Finding]:
    """A signal that was served, or a wait that ended, just when the time-out of an earlier call of that rank ran out."""
    for asked in observed:
        if not _SIGNAL.match(asked.kind) or asked.rank is None:
            continue
        later = [one for one in observed if one.rank == asked.rank and one.t_ns > asked.t_ns and _SERVED.match(one.kind)]
        if later and later[0].t_ns - asked.t_ns >= LEAST_NS and (call := _due(recording, asked, later[0].t_ns)):
            yield _finding(
                recording,
                SERVED,
                asked.rank,
                f"a signal to rank {asked.rank} was served {(later[0].t_ns - asked.t_ns) / 1e9:.1f} s later, when the time-out of the collective "
                "in which it waited had run out",
                asked,
                later[0],
                call,
            )
            return
    for one in tries:
        if one.error or one.ended_ns is None or one.ended_ns - one.begun_ns < LEAST_NS:
            continue
        start = Observation(kind="begun", rank=one.rank, pid=one.pid, t_ns=one.begun_ns, fields=one.fields, line=one.line)
        if call := _due(recording, start, one.ended_ns):
            yield _finding(
                recording,
                WAITED,
                one.rank,
                f"rank {one.rank} was held for {(one.ended_ns - one.begun_ns) / 1e9:.1f} s, without an error, until the time-out of a collective "
                "ran out that it had called before",
                start,
                start,
                call,
            )
            return


def _due(recording: Recording, start: Observation, ended_ns: int) -> Call | None:
    """A call made before `start` whose time-out ran out when it ended."""
    calls = recording.ranks.get(start.rank if start.rank is not None else -1)
    if calls is None or start.rank is None:
        return None
    for call in calls_between(recording, start.rank, 0, start.t_ns):
        limit_ms = calls.limits.get(call.lane.group)
        if limit_ms and abs(recording.created(call) + limit_ms * 1_000_000 - ended_ns) <= NEAR_NS:
            return call
    return None


def _finding(
    recording: Recording, likelihood: float, rank: int, because: str, asked: Observation, served: Observation, call: Call
) -> Finding:
    shown = [quote(asked.line, "cause")]
    if served.line is not asked.line:
        shown.append(quote(served.line, "cause"))
    return Finding(
        mode="uninterruptible-wait",
        analyst=ANALYST,
        likelihood=likelihood,
        because=because,
        first=rank,
        suspects=(rank,),
        at_ns=asked.t_ns,
        evidence=(*shown, quote_call(recording, call, "confirm", "waits in ")),
        not_proven="Why the others did not come to that collective.",
    )
