"""The two ways in which torch hands over a part for each rank: one tensor cut into parts, or a list of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtprobe.framework.transport.mpi import tensors as t
from dtprobe.framework.transport.mpi.errors import Unsupported
from dtprobe.framework.transport.mpi.tensors import Flat

Tensors = Sequence[torch.Tensor]


class Whole:
    """One tensor that holds a part for each rank."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensors: Tensors = [tensor]

    def fit(self, what: str, part: torch.Tensor, size: int) -> None:
        whole = self.tensors[0]
        t.check(what, whole, part)
        t.same_dtype(what, whole, part)
        if whole.numel() != part.numel() * size:
            raise Unsupported(
                f"{what}: {whole.numel()} elements are not {size} parts of {part.numel()}", "give every rank an equal part"
            )

    def flat(self, *, read: bool) -> Flat:
        return t.moved(self.tensors[0], read=read)

    def joined(self) -> torch.Tensor:
        return self.tensors[0]

    def deliver(self, sink: Flat) -> None:
        sink.deliver()


class Parts:
    """A tensor for each rank; MPI sees them joined."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def fit(self, what: str, part: torch.Tensor, size: int) -> None:
        t.check(what, part, *self.tensors)
        t.same_dtype(what, part, *self.tensors)
        if [each.numel() for each in self.tensors] != [part.numel()] * size:
            raise Unsupported(
                f"{what}: tensors of {[each.numel() for each in self.tensors]} elements are not {size} parts of {part.numel()}",
                "give every rank an equal part",
            )

    def flat(self, *, read: bool) -> Flat:
        first = self.tensors[0]
        memory = torch.empty(sum(each.numel() for each in self.tensors), dtype=first.dtype)
        return Flat(first, memory, copied=False)

    def joined(self) -> torch.Tensor:
        return torch.cat([each.detach().reshape(-1) for each in self.tensors])

    def deliver(self, sink: Flat) -> None:
        for tensor, part in zip(self.tensors, sink.memory.split([each.numel() for each in self.tensors]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
