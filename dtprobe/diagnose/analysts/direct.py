"""Lines that are evidence for a failure mode by themselves."""

from __future__ import annotations

from collections.abc import Iterator

from dtprobe.diagnose.case import Case, Event, Finding, quote
from dtprobe.diagnose.signatures import signatures

SHOWN = 4


def analyse(case: Case) -> Iterator[Finding]:
    """One finding a signature that names a mode: the first event of it counts."""
    known = signatures()
    by_signature: dict[str, list[Event]] = {}
    for event in case.events:
        if known[event.signature].mode:
            by_signature.setdefault(event.signature, []).append(event)
    for name, events in by_signature.items():
        signature = known[name]
        ranks = tuple(sorted({event.rank for event in events if event.rank is not None}))
        yield Finding(
            mode=str(signature.mode),
            analyst="direct",
            likelihood=signature.likelihood,
            because=f"{events[0].line.artifact.name}:{events[0].line.number} says so",
            first=events[0].rank,
            suspects=ranks[:1],
            host=events[0].host,
            at_ns=events[0].t_ns,
            evidence=tuple(quote(event.line, "cause") for event in events[:SHOWN]),
            not_proven=signature.not_proven,
        )
