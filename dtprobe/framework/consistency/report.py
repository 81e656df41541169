"""What a comparison found, as types and in words, and the errors that carry it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dtprobe.framework.errors import RankError

_LISTED = 8
"""Runs of ranks that a message lists before it counts the rest."""
_NAME = 120
"""Letters of a tensor's name that a message shows."""


@dataclass(frozen=True)
class Held:
    """What some ranks hold where others hold something else."""

    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    text: str
    """The value, exactly as Python writes it; of other fields what the ranks have there."""
    bits: str = ""
    """The element's bits in hex, the most significant first; empty where the difference is not one of elements."""


@dataclass(frozen=True)
class Difference:
    """One way in which one entry differs between ranks.

    `field` is `values`, `shapes`, `dtypes`, `strides`, `requires_grad`, `placements`, `order` or `names`. `ranks` are those
    outside the largest set of ranks that agree; where two sets are equally large `decided` is False and all are listed.
    For the values of a tensor `index` is the first element that differs, in the logical order of the part that a rank holds,
    and `at` its place in the tensor (of a DTensor: in the global one; None where its placements do not give it).
    `blocks` says in how many of how many parts of the tensor anything differs.
    """

    name: str
    field: str
    ranks: tuple[int, ...]
    decided: bool
    held: tuple[Held, ...]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    index: int | None = None
    at: tuple[int, ...] | None = None
    blocks: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        what = repr(shown(self.name, _NAME))
        if self.index is None:
            what += f" differs in {self.field}"
        else:
            place = f" = {list(self.at)}" if self.at is not None else ""
            what += f" ({self.dtype} {list(self.shape)}) differs at element {self.index}{place}"
        told = "; ".join(
            f"{spans(one.ranks)}: {one.text}" + (f" (0x{one.bits})" if one.bits else "") for one in self.held[:_LISTED]
        )
        if len(self.held) > _LISTED:
            told += f"; {len(self.held) - _LISTED} more kinds"
        if self.blocks[1] > 1:
            told += f"; {self.blocks[0]} of {self.blocks[1]} blocks of it differ"
        return f"{what}: {told}"


@dataclass(frozen=True)
class Report:
    """The result of a check, the same on every rank but for `tensors`, `size_bytes` and `alone`, which are this rank's own.

    `differences` are those found in detail; `more` entries, at least, differ as well. `unlisted` are ranks that differ from all
    others but were not looked at, because too many kinds were found. `alone` names tensors (sharded ones) that no other rank of
    the group holds a copy of, so that nothing was compared.
    """

    where: str
    """Which check of which group."""
    members: tuple[int, ...]
    tensors: int
    size_bytes: int
    alone: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    more: int = 0
    unlisted: tuple[int, ...] = ()

    @property
    def consistent(self) -> bool:
        return not self.differences

    @property
    def decided(self) -> bool:
        """Whether a majority tells in each case which ranks are wrong."""
        return all(one.decided for one in self.differences)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that differ from the majority, or all that contradict each other where there is none."""
        return tuple(sorted({rank for one in self.differences for rank in one.ranks} | set(self.unlisted)))

    def __str__(self) -> str:
        if self.consistent:
            alone = f", {len(self.alone)} of them held by one rank only" if self.alone else ""
            return f"{self.tensors} entries of {self.size_bytes} bytes agree on {spans(self.members)}{alone}"
        told = " | ".join(map(str, self.differences))
        if self.more:
            told += f" | at least {self.more} more entries differ"
        if self.unlisted:
            told += f" | {spans(self.unlisted)} differ too and were not looked at"
        return told if self.decided else f"{told} | no majority: undecided which is wrong"


class Inconsistent(RankError):
    """Ranks hold different state; raised on every rank of the group.

    `ranks` deviate from the majority, or are all that contradict each other when `decided` is False; `report` has the details.
    """

    def __init__(self, report: Report) -> None:
        blamed = (
            f"{spans(report.ranks)} against the majority" if report.decided else f"{spans(report.ranks)} contradict each other"
        )
        remedy = (
            "take the state of a rank that agrees with the majority, and look at the named ranks' memory, kernels and control flow"
            if report.decided
            else "compare with a third copy, a checkpoint say, to see which is right"
        )
        super().__init__(f"{report.where}: {blamed}: {report}", remedy, ranks=report.ranks)
        self.report = report
        self.decided = report.decided


class NotDistinct(RankError):
    """Ranks hold the same data where each should have its own; raised on every rank. `same` are the sets of ranks that do."""

    def __init__(self, where: str, message: str, same: Iterable[Iterable[int]]) -> None:
        self.same = tuple(tuple(ranks) for ranks in same)
        super().__init__(
            f"{where}: {message}",
            "give the sampler each rank's own rank and num_replicas, or seed the data by rank",
            ranks=(rank for ranks in self.same for rank in ranks),
        )


class Incomparable(RankError):
    """The comparison could not be made: ranks asked for different ones, or something on `ranks` cannot be compared."""


def verdict_of(counts: Mapping[str, Iterable[int]]) -> tuple[tuple[int, ...], bool]:
    """From the ranks by what they hold: those outside the largest set, and True; all of them and False when two are largest."""
    sets = sorted((tuple(ranks) for ranks in counts.values()), key=len, reverse=True)
    decided = len(sets) < 2 or len(sets[0]) > len(sets[1])
    return tuple(sorted(rank for ranks in sets[1 if decided else 0 :] for rank in ranks)), decided


def spans(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-6, 8`; of a long list the first runs and how many ranks follow."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs[:_LISTED])
    rest = sum(last - first + 1 for first, last in runs[_LISTED:])
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    return ("rank " if single else "ranks ") + text + (f" and {rest} more" if rest else "")


def place(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of each dim for element `index` of a tensor of that shape, in row-major order."""
    return tuple(index // math.prod(shape[dim + 1 :]) % size for dim, size in enumerate(shape))


def shown(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
