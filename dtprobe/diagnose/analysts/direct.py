"""Lines that are evidence for a failure mode by themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from dtprobe.diagnose.case import Case, Event, Finding, First, Quote, quote
from dtprobe.diagnose.facts.about import device_rank, in_order, rank_of, whom
from dtprobe.diagnose.signatures import Signature, signatures

SHOWN = 6
"""So many lines of one mode are quoted."""
EACH = 3
"""So many of one signature."""
ALONE = 0.4
"""Lines less telling than this strengthen others and say nothing by themselves: good runs print them too."""
SECOND = 0.5
"""How much a further signature of the same mode adds."""


def analyse(case: Case) -> Iterator[Finding]:
    """One finding a mode: all signatures of it together, about the rank that the lines are about."""
    known = signatures()
    by_mode: dict[str, list[Event]] = defaultdict(list)
    for event in case.events:
        if mode := known[event.signature].mode:
            by_mode[mode].append(event)
    for mode, events in by_mode.items():
        if max(known[event.signature].likelihood for event in events) >= ALONE:
            yield _finding(case, mode, events)


def _finding(case: Case, mode: str, events: Sequence[Event]) -> Finding:
    known = signatures()
    kinds = sorted({event.signature for event in events}, key=lambda name: -known[name].likelihood)
    strongest = known[kinds[0]]
    decisive = in_order(event for event in events if known[event.signature].likelihood >= 0.75 * strongest.likelihood)
    first, suspects = whom(decisive, case, strongest.scope)
    if first is None:
        first, suspects = whom(in_order(events), case, strongest.scope)
    if first is None and any("gpu" in event.fields for event in decisive):
        rank = device_rank(case, decisive[0].host)
        first, suspects = rank, () if rank is None else (rank,)
    leading = _leading(decisive, first, case)
    return Finding(
        mode=mode,
        analyst="direct",
        likelihood=_together([known[name] for name in kinds]),
        because=_because(leading, first),
        first=first,
        suspects=suspects,
        host=leading.host,
        at_ns=leading.t_ns,
        evidence=shown(decisive, leading),
        not_proven=strongest.not_proven,
    )


def _together(kinds: Sequence[Signature]) -> float:
    """The strongest, a little surer for each other kind of line that says the same."""
    unlikely = 1 - kinds[0].likelihood
    for one in kinds[1:]:
        unlikely *= 1 - SECOND * one.likelihood
    return min(0.97, 1 - unlikely)


def _leading(events: Sequence[Event], first: First, case: Case) -> Event:
    """The first event of the rank that is named; the strongest kind of it where one rank said several things."""
    known = signatures()
    own = [event for event in events if isinstance(first, int) and rank_of(event, case) == first] or list(events)
    return max(own, key=lambda event: known[event.signature].likelihood)


def shown(events: Sequence[Event], leading: Event) -> tuple[Quote, ...]:
    """The leading line, then a few of each kind, other ranks' before more of the same."""
    chosen = [leading]
    count: dict[str, int] = defaultdict(int)
    count[leading.signature] = 1
    seen = {(leading.line.artifact.name, leading.line.number)}
    fresh = sorted(events, key=lambda event: event.signature == leading.signature)
    for event in fresh:
        place = (event.line.artifact.name, event.line.number)
        if place not in seen and count[event.signature] < EACH and len(chosen) < SHOWN:
            seen.add(place)
            count[event.signature] += 1
            chosen.append(event)
    return tuple(quote(event.line, "cause") for event in chosen)


def _because(event: Event, first: First) -> str:
    said = event.line.text.strip()
    said = said if len(said) <= 160 else said[:157] + "..."
    who = "All ranks are affected alike" if first == "all" else "A line says" if first is None else f"Rank {first}"
    return f"{who}{f' on {event.host}' if event.host else ''}: {said}"
