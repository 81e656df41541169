"""Restarts that met what the attempt before had left in the store, and launchers that each made a world of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dtprobe.diagnose import seen
from dtprobe.diagnose.case import Case, Finding, Line, quote
from dtprobe.diagnose.facts.restarted import attempts
from dtprobe.diagnose.seen.observed import Observation, Try

ANALYST = "restarts"
STALE, NESTED = 0.85, 0.7
TOGETHER_NS = 5_000_000_000
"""Begun within so long of each other's end: not one after the other."""
_COUNT = re.compile(r"(?i)restart[_ ]?count[\"']?\s*[=:]\s*(?P<count>\d{1,4})")
_ENDPOINT = re.compile(r"(?P<host>\d+\.\d+\.\d+\.\d+|[A-Za-z][\w.-]*)[<:](?P<port>\d{4,5})\b")
_PUBLISHED = re.compile(r"(?i)\b(?:publish\w*|wrote|writes?|written|set|stored?|put|created?|announc\w*|listen\w*)\b")
_READ = re.compile(r"(?i)\b(?:read|reads|got|get|fetch\w*|receiv\w*|found|took|join\w*|connect\w*)\b")
MESH = ("gloo-mesh-refused", "gloo-mesh-failed", "gloo-loopback-connect", "gloo-unreachable")


def analyse(case: Case) -> Iterator[Finding]:
    """A finding each for a stale store and for nested launchers."""
    observed = seen.of(case).observations
    yield from _stale(case, observed)
    yield from _other_attempt(case)
    yield from _nested(seen.of(case).tries)


def _stale(case: Case, observed: Sequence[Observation]) -> Iterator[Finding]:
    """The mesh of a restarted attempt goes to addresses that nobody listens at any more."""
    refused = [event for event in case.of(*MESH) if "refused" in event.line.text.lower()]
    if not refused:
        return
    told = case.of("restart-count")
    again = _restarted(observed)
    known = attempts(case)
    later = [event for event in refused if known.of(event.line) > known.first]
    if not told and not again and not later:
        return
    refused = later or refused
    ranks = tuple(sorted({event.rank for event in refused if event.rank is not None}))
    evidence = [quote(refused[0].line, "cause")]
    evidence += [quote(event.line, "cause") for event in told[:1]] + [quote(one.line, "confirm") for one in again[:2]]
    yield Finding(
        mode="restart-stale-store",
        analyst=ANALYST,
        likelihood=STALE,
        because="After a restart a rank connects to an address at which nobody listens: it was read from the store of the attempt before.",
        suspects=ranks,
        at_ns=refused[0].t_ns,
        evidence=tuple(evidence),
        not_proven="why the attempt before the restart failed",
    )


def _other_attempt(case: Case) -> Iterator[Finding]:
    """Ranks that count another attempt than their peers, or go to another address than was published, which refuses them."""
    marked = [line for line in case.lines if "estart" in line.text or "ESTART" in line.text]
    if not marked:
        return
    refused = [line for line in case.lines if "refused" in line.text or "connection abort" in line.text]
    stale = _at_old_address(case, refused) or (_behind(marked) if refused else {})
    if not stale:
        return
    ranks = tuple(sorted(stale))
    line, other = stale[ranks[0]]
    yield Finding(
        mode="restart-stale-store",
        analyst=ANALYST,
        likelihood=STALE,
        because=f"After a restart rank {', '.join(map(str, ranks[:8]))} still goes by what the attempt before left in the store.",
        first=ranks[0],
        suspects=ranks,
        at_ns=line.t_ns,
        evidence=(quote(line, "cause"), quote(other, "cause"), *(quote(each, "confirm") for each in refused[:1])),
        not_proven="why the attempt before the restart failed",
    )


def _at_old_address(case: Case, refused: Sequence[Line]) -> dict[int, tuple[Line, Line]]:
    """The ranks that read an address other than the one published last, and are refused there: their line, and the publisher's."""
    published: tuple[str, Line] | None = None
    found: dict[int, tuple[Line, Line]] = {}
    for line in case.lines if refused else ():
        if line.rank is None or not ("<" in line.text or ":" in line.text) or not (at := _ENDPOINT.search(line.text)):
            continue
        if _PUBLISHED.search(line.text):
            published = at["port"], line
        elif published is not None and at["port"] != published[0] and _READ.search(line.text) and _named(at["port"], refused):
            found[line.rank] = line, published[1]
    return found


def _named(port: str, refused: Sequence[Line]) -> bool:
    return any(port in line.text for line in refused)


def _behind(marked: Sequence[Line]) -> dict[int, tuple[Line, Line]]:
    """The ranks that tell a lower number of restarts below a line that tells a higher one."""
    newest: tuple[int, Line] | None = None
    found: dict[int, tuple[Line, Line]] = {}
    for line in marked:
        if line.rank is None or not (told := _COUNT.search(line.text)):
            continue
        count = int(told["count"])
        if newest is None or count > newest[0]:
            newest = count, line
        elif count < newest[0] and line.artifact.name == newest[1].artifact.name:
            found[line.rank] = line, newest[1]
        else:
            found.pop(line.rank, None)
    return found


def _restarted(observed: Sequence[Observation]) -> list[Observation]:
    """The last record of a rank's first process and the first one of a later process of that rank."""
    last: dict[int, Observation] = {}
    for one in sorted(observed, key=lambda each: each.t_ns):
        if one.rank is None or one.pid is None or one.kind in ("begun", "attempt"):
            continue  # whoever starts the attempts records them, too
        before = last.get(one.rank)
        if before is not None and before.pid != one.pid:
            return [before, one]
        last[one.rank] = one
    return []


def _nested(tries: Sequence[Try]) -> Iterator[Finding]:
    """Processes at one time that each say they are rank 0, and none that it is another."""
    zeros: dict[int, list[Try]] = {}
    for one in tries:
        if one.rank != 0:
            return
        if one.pid is not None:
            zeros.setdefault(one.pid, []).append(one)
    if len(zeros) < 2 or len({found[0].line.artifact.name for found in zeros.values()}) < len(zeros):
        return  # children of one rank speak in its name, and into its own file
    begun = max(found[0].begun_ns for found in zeros.values())
    ended = min(found[-1].ended_ns or found[-1].begun_ns for found in zeros.values())
    if begun > ended + TOGETHER_NS:
        return
    yield Finding(
        mode="nested-launcher",
        analyst=ANALYST,
        likelihood=NESTED,
        because=f"{len(zeros)} processes of one job each say that they are rank 0, and none that it is another: each made a world of its own.",
        first="all",
        evidence=tuple(quote(found[0].line, "cause") for found in list(zeros.values())[:4]),
        not_proven="which launcher was started by which",
    )
