"""What the job itself checked and recorded: values that are wrong, ranks that should be equal and are not, things that only grow.

Such records show that something is wrong, mostly without an error, and seldom why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from dtprobe.diagnose import seen
from dtprobe.diagnose.case import Case, Finding, Line, quote
from dtprobe.diagnose.seen.observed import Observation
from dtprobe.diagnose.seen.states import Sample

ANALYST = "checks"
WRONG, APART, SCALES, LEAK = 0.45, 0.75, 0.8, 0.6
DIGESTS = ("digest", "checksum", "hash", "crc", "fingerprint")
FULL_GROWTH, STEPS, MOST_FALLS = 30, 5, 5
"""So many threads more than at first, in so many steps, with hardly one ended: they are not those of groups in use."""


def analyse(case: Case) -> Iterator[Finding]:
    """Findings from the ranks' own records and from samples of their processes."""
    found = seen.of(case)
    yield from _apart(found.observations)
    yield from _wrong(found.observations)
    if not any(one.error or one.ended_ns is None for one in found.tries):
        yield from _leak(found.states)


def _apart(observed: Sequence[Observation]) -> Iterator[Finding]:
    """Replicas whose records of one step differ: digests of what should be equal, or the scale of a loss scaler."""
    scale = _first_difference(observed, ("scale", "loss_scale", "grad_scale"))
    if scale is not None:
        step, lines = scale
        yield Finding(
            mode="scaler-divergence",
            analyst=ANALYST,
            likelihood=SCALES,
            because=f"At step {step} the ranks hold different loss scales.",
            suspects=tuple(sorted(lines)),
            evidence=tuple(quote(line, "cause") for line in list(lines.values())[:3]),
            not_proven="on which rank the gradients overflowed",
        )
    digest = _first_difference(observed, DIGESTS)
    if digest is not None:
        step, lines = digest
        odd = _odd(observed, step)
        yield Finding(
            mode="silent-corruption",
            analyst=ANALYST,
            likelihood=APART,
            because=f"At step {step} the ranks' digests of what should be equal differ for the first time"
            + (f": rank {odd} stands alone." if odd is not None else "."),
            first=odd,
            suspects=(odd,) if odd is not None else tuple(sorted(lines)),
            evidence=tuple(quote(line, "cause") for line in list(lines.values())[:3]),
            not_proven="what changed the data: memory, a kernel, or code that runs on one rank only",
        )


def _first_difference(observed: Sequence[Observation], names: Sequence[str]) -> tuple[int, Mapping[int, Line]] | None:
    """The first step at which ranks recorded different values under one of these names."""
    by_step: dict[int, dict[int, tuple[object, Line]]] = {}
    for one in observed:
        step = one.fields.get("step")
        value = next((one.fields[name] for name in names if one.fields.get(name) is not None), None)
        if isinstance(step, int) and value is not None and one.rank is not None:
            by_step.setdefault(step, {})[one.rank] = value, one.line
    for step in sorted(by_step):
        values = by_step[step]
        if len({str(value) for value, _line in values.values()}) > 1:
            return step, {rank: line for rank, (_value, line) in sorted(values.items())}
    return None


def _odd(observed: Sequence[Observation], step: int) -> int | None:
    """The one rank whose digest differs from that of all others."""
    values = {
        one.rank: str(next((one.fields[name] for name in DIGESTS if one.fields.get(name) is not None), ""))
        for one in observed
        if one.fields.get("step") == step and one.rank is not None and any(name in one.fields for name in DIGESTS)
    }
    for rank, value in values.items():
        others = [other for each, other in values.items() if each != rank]
        if len(others) > 1 and value not in others and len(set(others)) == 1:
            return rank
    return None


def _wrong(observed: Sequence[Observation]) -> Iterator[Finding]:
    """A check of the job's own found wrong values: a lead, no more."""
    wrong = [one for one in observed if _is_wrong(one.fields)]
    if not wrong:
        return
    ranks = sorted({one.rank for one in wrong if one.rank is not None})
    yield Finding(
        mode="silent-corruption",
        analyst="own check",
        likelihood=WRONG,
        because=f"The job's own check found wrong values on rank {', '.join(map(str, ranks[:8]))}, and no error told of it.",
        suspects=tuple(ranks),
        at_ns=wrong[0].t_ns,
        evidence=tuple(quote(one.line, "cause") for one in wrong[:3]),
        not_proven="what made them wrong: compare the ranks' calls (operation, root, datatype, size, order of groups) and the layout of the tensors",
    )


def _is_wrong(fields: Mapping[str, object]) -> bool:
    wrong = fields.get("wrong")
    if isinstance(wrong, bool):
        return wrong
    if isinstance(wrong, int | float):
        return wrong > 0
    got = next((fields[name] for name in ("value", "sum", "got", "actual") if name in fields), None)
    right = next((fields[name] for name in ("right", "expected") if name in fields), None)
    return isinstance(got, int | float) and isinstance(right, int | float) and got != right


def _leak(states: Sequence[Sample]) -> Iterator[Finding]:
    """Threads of a rank that come and never end, beside descriptors that do the same."""
    by_rank: dict[int, list[Sample]] = {}
    for one in states:
        if one.rank is not None and one.threads is not None and one.threads > 1:
            by_rank.setdefault(one.rank, []).append(one)
    for rank, samples in sorted(by_rank.items()):
        threads = [one.threads or 0 for one in samples]
        top = threads.index(max(threads))
        start = threads.index(min(threads[: top // 2 + 1]))
        grown = threads[start : top + 1]
        steps = sum(after > before for before, after in pairwise(grown))
        falls = sum(before - after for before, after in pairwise(grown) if after < before)
        fds = [one.fds or 0 for one in samples[start : top + 1]]
        if grown and grown[-1] - grown[0] >= FULL_GROWTH and steps >= STEPS and falls <= MOST_FALLS and fds[-1] > fds[0]:
            yield Finding(
                mode="gloo-thread-leak",
                analyst=ANALYST,
                likelihood=LEAK,
                because=f"Rank {rank} grew from {grown[0]} to {grown[-1]} threads and from {fds[0]} to {fds[-1]} descriptors, and none ended.",
                first="all" if len(by_rank) > 1 else rank,
                suspects=tuple(by_rank),
                evidence=(quote(samples[start].line, "confirm"), quote(samples[top].line, "cause")),
                not_proven="which references keep them: destroyed groups that something still holds are the usual ones",
            )
            return
