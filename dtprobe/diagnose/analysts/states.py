"""States of the ranks' processes: stopped ones, and descriptors or threads that only grow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtprobe.diagnose import seen
from dtprobe.diagnose.case import Case, Finding, quote
from dtprobe.diagnose.seen.states import Sample

ANALYST = "states"
STOPPED, STUCK = 0.9, 0.6
LEAST_NS = 500_000_000
"""A stop shorter than this is a debugger's or a sampler's."""


def analyse(case: Case) -> Iterator[Finding]:
    """A rank that was stopped for a while, or waits in the kernel where no signal reaches it."""
    by_rank: dict[int, list[Sample]] = {}
    for one in seen.of(case).states:
        if one.rank is not None:
            by_rank.setdefault(one.rank, []).append(one)
    for letters, mode, likelihood, words in (("Tt", "rank-stopped", STOPPED, "was stopped"),):
        spans = {rank: span for rank, samples in by_rank.items() if (span := _longest(samples, letters))}
        if spans and len(spans) < max(2, len(by_rank)):
            rank, span = max(spans.items(), key=lambda item: _length(item[1]))
            length = _length(span) / 1e9
            yield Finding(
                mode=mode,
                analyst=ANALYST,
                likelihood=likelihood,
                because=f"Process {span[0].pid}, rank {rank}, {words}" + (f" for {length:.1f} s." if length else "."),
                first=rank,
                suspects=(rank,),
                at_ns=span[0].t_ns,
                evidence=(quote(span[0].line, "cause"), *((quote(span[-1].line, "confirm"),) if len(span) > 1 else ())),
                not_proven="who stopped it",
            )


def _longest(samples: Sequence[Sample], letters: str) -> list[Sample]:
    """The longest run of samples in these states; one undated look counts, a short dated one does not."""
    best: list[Sample] = []
    run: list[Sample] = []
    for one in [*samples, None]:
        if one is not None and one.state in letters:
            run.append(one)
            continue
        if run and (run[0].t_ns is None or _length(run) >= LEAST_NS) and (not best or _length(run) > _length(best)):
            best = run
        run = []
    return best


def _length(samples: Sequence[Sample]) -> int:
    first, last = samples[0].t_ns, samples[-1].t_ns
    return last - first if first is not None and last is not None else 0
