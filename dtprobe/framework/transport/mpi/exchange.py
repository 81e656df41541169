"""Large sums by exchange: each rank adds up one part of the tensor for all, in its own precision, and hands the result round.

Open MPI's non-blocking reductions take many dependent rounds, each of which waits for a poll of the engine; here there are
two, and every byte crosses as often as in a ring. float16 and bfloat16 cross as they are, are added in float32 and rounded
once. Ranks are added in their order, so the result is the same bits on every rank and in every run.

The second round of one sum starts when its first is complete, at another time on each rank, while other operations are under
way. So the parts travel as messages under a tag of their own: collectives would meet in another order on each rank.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from mpi4py import MPI

from dtprobe.framework.errors import CollectiveMismatch
from dtprobe.framework.transport.mpi import tensors as t
from dtprobe.framework.transport.mpi.receive import Mailbox, Receive
from dtprobe.framework.transport.mpi.tensors import Reduction

PART_MIN = 2 * 1024
"""Bytes of a part from which the exchange is used; below, MPI's own reduction has the shorter way.

It is small because an exchange sees that ranks brought tensors of different sizes. Of MPI's own reduction such a program gets
MPI_ERR_TRUNCATE, and from Open MPI memory overwritten as well, once its messages are larger than 4 KiB (see receive.py)."""


def pays(memory: torch.Tensor, how: Reduction, size: int) -> bool:
    """Whether `memory`, cut into a part for each of `size` ranks, is reduced by exchange."""
    large = memory.numel() * memory.element_size() >= PART_MIN * size
    return size > 1 and large and how.op == MPI.SUM and how.factor is None


class Exchange:
    """One sum over the ranks of `box`'s communicator: `send_parts`, then `add`, or for an all-reduce `hand_round`.

    `tags` are two that no other sum under way there has, the same on every rank.
    """

    def __init__(self, box: Mailbox, memory: torch.Tensor, how: Reduction, tags: tuple[int, int]) -> None:
        self._box, self._how, self._tags = box, how, tags
        self._receives: list[Receive] = []
        comm = box.comm
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        share, more = divmod(memory.numel(), self._size)
        counts = [share + (other < more) for other in range(self._size)]
        starts = list(accumulate(counts, initial=0))
        self._parts = [memory[start : start + count] for start, count in zip(starts, counts, strict=False)]
        mine = counts[self._rank]
        came = torch.empty(self._size * mine, dtype=memory.dtype)
        self._came = list(came.split(mine)) if mine else [came] * self._size
        self._came[self._rank] = self._parts[self._rank]
        self._others = [other for other in range(self._size) if other != self._rank]

    def send_parts(self) -> list[Any]:
        """Every rank's part to that rank."""
        self._receives = [self._box.receive(self._came[other], other, self._tags[0]) for other in self._others]
        sends = [self._box.comm.Isend(t.spec(self._parts[other]), other, self._tags[0]) for other in self._others]
        return [*self._receives, *sends]

    def add(self, into: torch.Tensor) -> None:
        """Write the sum (or mean) of this rank's part into `into`; raises CollectiveMismatch where ranks cut other parts."""
        self.check()
        total = self._came[0].to(self._how.wire, copy=True)
        for other in self._came[1:]:
            total.add_(other)
        if self._how.mean:
            total.div_(self._size)
        into.copy_(total)

    def hand_round(self) -> list[Any]:
        """The sum of this rank's part to all, theirs to this rank."""
        mine = self._parts[self._rank]
        self.add(mine)
        self._receives = [self._box.receive(self._parts[other], other, self._tags[1]) for other in self._others]
        return [*self._receives, *(self._box.comm.Isend(t.spec(mine), other, self._tags[1]) for other in self._others)]

    def check(self) -> None:
        """Raise CollectiveMismatch when another rank sent a part of another size."""
        for each in self._receives:
            if not each.fits:
                raise CollectiveMismatch(
                    f"ranks sum tensors of different sizes: rank {each.source} of the group sent a part of {each.came} elements, "
                    f"rank {self._rank} has {each.expected}",
                    "see which rank is wrong with dtprobe.framework.checked",
                    decided=False,
                )
