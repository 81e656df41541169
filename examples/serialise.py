"""Remote calls with a class and a tensor subclass of one's own, gradient included, and a call that is refused:

    torchrun --standalone --nproc-per-node=2 examples/serialise.py [plain]

With `plain` torch's own pickler is used: see the gradient that is missing.
"""

from __future__ import annotations

import contextlib
import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc

from dtprobe.errors import DtprobeError
from dtprobe.framework.transport.serialise import Registry


class Scaled(torch.Tensor):
    """A tensor that knows its scale."""

    scale: float


class Batch:
    def __init__(self, values: torch.Tensor, name: str) -> None:
        self.values = values
        self.name = name


def loss(batch: Batch) -> torch.Tensor:
    return (batch.values * batch.values.scale).sum()


def not_for_others() -> None:
    """Nobody registered it."""


registry = Registry()
registry.register(Batch, lambda batch: (batch.values, batch.name), Batch)
registry.register_tensor(Scaled, attributes=("scale",))
registry.allow(loss)


def main(plain: bool) -> None:
    rank = int(os.environ["RANK"])
    with contextlib.nullcontext() if plain else registry.installed():
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
        if rank == 0:
            ask()
        rpc.shutdown()


def ask() -> None:
    leaf = torch.ones(3, requires_grad=True)
    values = (leaf * 2).as_subclass(Scaled)
    values.scale = 5.0
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [rpc.rpc_sync("worker1", loss, (Batch(values, "first"),)).as_subclass(torch.Tensor)])
        print("gradient, 10 everywhere is right:", dist_autograd.get_gradients(context).get(leaf))
    try:
        rpc.rpc_sync("worker1", not_for_others)
        print("a function that nobody registered was called")
    except DtprobeError as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:] == ["plain"])
