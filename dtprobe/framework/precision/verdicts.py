"""What the audit concludes of one parameter, from what every rank measured of its gradient."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtprobe.framework.precision.projection import COUNT


class Kind(enum.StrEnum):
    """How the gradient that a rank was left with differs from the mean of what the ranks computed."""

    UNREDUCED = "unreduced"
    """It is the rank's own: the other ranks' part is lost."""
    SCALED = "scaled"
    """It is a multiple of the mean: the sum, for one that was not divided."""
    MISSING = "missing"
    """There is none, though the ranks computed one."""
    ALTERED = "altered"
    """It is something else: an older one, or changed after the reduction."""


@dataclass(frozen=True)
class Measured:
    """One rank's numbers of one parameter, each four projections and the squared norm; None where there was no gradient.

    `computed` is what backward left to be averaged, `left` what the rank has of the result: all of it, or a shard. Ranks of one
    `replica` hold the shards of one whole. `base` are projections of what was in the result before, and stays in it.
    """

    computed: Sequence[float] | None
    left: Sequence[float] | None
    replica: int
    judged: bool = True
    base: Sequence[float] | None = None


@dataclass(frozen=True)
class Loss:
    """A gradient that was lost or falsified without a word.

    `parameter` is its name in the model without wrappers; `ranks` (global) are those left with a wrong gradient; `off` is the
    norm of the error over that of the ranks' own gradients; `factor` for SCALED how many times the mean it is; `because` says why.
    """

    parameter: str
    kind: Kind
    ranks: tuple[int, ...]
    off: float
    factor: float | None
    because: str = ""

    def __str__(self) -> str:
        ranks = ", ".join(str(rank) for rank in self.ranks)
        size = f"{self.factor:.3g} times the mean" if self.factor is not None else f"off by {self.off:.0%}"
        return f"{self.parameter}: {self.kind} on rank{'s' if len(self.ranks) > 1 else ''} {ranks} ({size}): {self.because}"


def judged(parameter: str, heard: Mapping[int, Measured], ranks: Sequence[int], tolerance: float) -> Loss | None:
    """The loss of `parameter`, or None; `heard` has each rank that has the parameter, `ranks` are all that are averaged over.

    A rank without a gradient counts as zero, as it does in DDP's mean. Where no rank computed one in backward, those that
    have one all the same (`torch.autograd.grad`) are held against their own mean. Gradients with inf or nan in them are lost
    where another rank's is finite.
    """
    if not all(one.judged for one in heard.values()):
        return None
    computed = {rank: one.computed for rank, one in heard.items()}
    if not any(computed.values()):
        computed = {rank: one.left for rank, one in heard.items()}
    if not any(computed.values()):
        return None
    mean = _mean([each for each in computed.values() if each is not None], len(ranks))
    power = sum(each[COUNT] for each in computed.values() if each is not None) / len(ranks)
    lefts = {
        replica: [one.left for one in heard.values() if one.replica == replica]
        for replica in {one.replica for one in heard.values()}
    }
    bases = {replica: _sum([one.base for one in heard.values() if one.replica == replica]) for replica in lefts}
    wrong: dict[int, tuple[Kind, float, float | None]] = {}
    for rank, one in heard.items():
        if all(left is None for left in lefts[one.replica]):
            wrong[rank] = (Kind.MISSING, 1.0, None)
            continue
        left = [a - b for a, b in zip(_sum(lefts[one.replica]), bases[one.replica], strict=True)]
        verdict = _compared(left, mean, computed[rank], power, tolerance)
        if verdict is not None:
            wrong[rank] = verdict
    if not wrong or (all(kind is Kind.MISSING for kind, _, _ in wrong.values()) and power == 0):
        return None
    kinds = [kind for kind, _, _ in wrong.values()]
    # of two ranks whose gradients are not reduced one may by chance have the mean: the kind of most decides
    kind = max(Kind, key=kinds.count)
    factors = [factor for each, _, factor in wrong.values() if each is kind]
    return Loss(parameter, kind, tuple(sorted(wrong)), max(off for _, off, _ in wrong.values()), factors[0])


def _compared(
    left: Sequence[float], mean: Sequence[float], own: Sequence[float] | None, power: float, tolerance: float
) -> tuple[Kind, float, float | None] | None:
    if not math.isfinite(power):
        return (Kind.ALTERED, math.inf, None) if all(map(math.isfinite, left)) else None
    if not all(map(math.isfinite, left)):
        return Kind.ALTERED, math.inf, None
    scale = math.sqrt(power)
    error = _distance(left, mean)
    if error <= tolerance * scale:
        return None
    off = error / scale if scale else math.inf
    if own is not None and _distance(left, own) <= tolerance * scale:
        return Kind.UNREDUCED, off, None
    along = sum(a * b for a, b in zip(left[:COUNT], mean[:COUNT], strict=True))
    norm = sum(a * a for a in mean[:COUNT])
    factor = along / norm if norm else 0.0
    if factor and _distance(left, [factor * each for each in mean]) <= tolerance * scale * max(abs(factor), 1.0):
        return Kind.SCALED, off, factor
    return Kind.ALTERED, off, None


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one[:COUNT], other[:COUNT], strict=True)) / COUNT)


def _mean(each: Sequence[Sequence[float]], count: int) -> list[float]:
    return [value / count for value in _sum(each)]


def _sum(each: Sequence[Sequence[float] | None]) -> list[float]:
    held = [one for one in each if one is not None]
    return [sum(values) for values in zip(*held, strict=True)] if held else [0.0] * (COUNT + 1)
