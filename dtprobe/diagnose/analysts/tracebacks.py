"""Which exception came first: causes on one rank against effects on the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtprobe.diagnose.case import Case, Finding, First, Quote, quote
from dtprobe.diagnose.facts.ends import ends
from dtprobe.diagnose.facts.raised import Raised, raised
from dtprobe.diagnose.facts.restarted import attempts
from dtprobe.diagnose.facts.words import named_rank, words

MANY = 0.5
"""The same exception on more than this part of the ranks is everybody's."""


def analyse(case: Case) -> Iterator[Finding]:
    """At most one finding: the first exception that no other failure explains."""
    found = [one for one in raised(case) if not one.ignored and not one.launcher]
    causes = [one for one in found if not one.effect]
    if not causes:
        return
    roots = _roots(_of_first_attempt(case, causes))
    first = _first(roots)
    alike = [one for one in roots if _same(one, first)]
    ranks = sorted({rank for one in alike if (rank := _rank(case, one)) is not None})
    everybody = len(ranks) > 1 and len(ranks) > MANY * max(_size(case), 1)
    unnamed_many = not ranks and len(alike) > 1
    named: First = "all" if everybody or unnamed_many else _foremost(case, alike, ranks)
    effects = [one for one in found if one.effect][:2]
    at = first.where
    ended = first.type.rpartition(".")[2] in ("StopIteration", "StopAsyncIteration") and not everybody
    yield Finding(
        mode="uneven-dataloader-desync" if ended else "python-exception-one-rank",
        analyst="tracebacks",
        likelihood=0.62 if named == "all" else (0.85 if ranks else 0.7),
        because=_because(first, named, len(alike)) + (f" It came from {at}." if at else ""),
        first=named,
        suspects=() if named == "all" else tuple(ranks) if named is None else (named,),
        host=first.line.host,
        at_ns=first.line.t_ns,
        evidence=_quotes(first, effects),
        not_proven="whether the exception names its own cause" if first.chained else "",
    )


def _foremost(case: Case, alike: Sequence[Raised], ranks: Sequence[int]) -> int | None:
    """The one rank that raised it, or that did so first; None where the times do not tell the ranks apart."""
    if len(ranks) < 2:
        return ranks[0] if ranks else None
    timed = sorted(
        (one.line.t_ns, rank) for one in alike if one.line.t_ns is not None and (rank := _rank(case, one)) is not None
    )
    apart = len({rank for _, rank in timed}) == len(ranks) and timed[0][0] < next(
        at for at, rank in timed if rank != timed[0][1]
    )
    return timed[0][1] if apart else None


def _because(first: Raised, named: First, many: int) -> str:
    if named == "all":
        return f"{many} ranks raised the same {first.short}."
    who = f"Rank {named}" if named is not None else "One rank" if many == 1 else f"{many} ranks"
    return f"{who} raised {first.short} before anything else failed."


def _quotes(first: Raised, effects: Sequence[Raised]) -> tuple[Quote, ...]:
    frames = [quote(line, "confirm") for line in first.frame_lines[-1:]]
    return (quote(first.line, "cause"), *frames, *(quote(one.line, "effect") for one in effects))


def _roots(causes: Sequence[Raised]) -> list[Raised]:
    """The first link of every chain: what follows within the same stream was raised because of it."""
    chained = [one for one in causes if one.chained]
    return [one for one in causes if not one.chained] or list(chained)


def _of_first_attempt(case: Case, causes: Sequence[Raised]) -> Sequence[Raised]:
    known = attempts(case)
    if not known.several:
        return causes
    earliest = min(known.of(one.line) for one in causes)
    return [one for one in causes if known.of(one.line) == earliest]


def _first(roots: Sequence[Raised]) -> Raised:
    timed = [one for one in roots if one.line.t_ns is not None]
    if len(timed) == len(roots):
        return min(timed, key=lambda one: one.line.t_ns or 0)
    return roots[0]


def _same(one: Raised, other: Raised) -> bool:
    return one.type == other.type and (one.where == other.where or one.text[:40] == other.text[:40])


def _rank(case: Case, one: Raised) -> int | None:
    if one.rank is not None:
        return one.rank
    if one.line.pid is not None:
        if seat := case.who.at_pid(one.line.pid, one.line.host):
            return seat.rank
        if (rank := words(case).processes.get((one.line.host, one.line.pid))) is not None:
            return rank
    if (rank := announced(case, one)) is not None:
        return rank
    own = {end.rank for end in ends(case) if end.rank is not None and end.code > 0}
    return own.pop() if len(own) == 1 else None


def announced(case: Case, one: Raised) -> int | None:
    """The rank that the line just before a bare traceback names: a logger's own line stands before the exception it was given."""
    if one.first_line < 2:
        return None
    before = (line for line in case.lines if line.artifact.name == one.line.artifact.name and line.number == one.first_line - 1)
    return next((rank for line in before if (rank := named_rank(line.text)) is not None), None)


def _size(case: Case) -> int:
    return case.who.world_size or len(case.who.seen)
