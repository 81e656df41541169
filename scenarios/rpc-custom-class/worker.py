"""Remote calls with what one may want to send: a tensor, a subclass, a class bound from C++, a result of an autograd.Function.

Each case is tried by rank 0. `arrived` says what the other rank got, and `gradient` whether the gradient of a remote call is that of a local
one. `--plain` leaves out all but plain tensors. `--registry` installs the framework's registry around the calls.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc

from dtprobe import attempt
from dtprobe.worker import together

PEER = "worker1"


class Scaled(torch.Tensor):
    """A tensor that knows its scale."""

    scale: float


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class Profile:
    """Holds an object bound from C++ whose class says nothing about how to be pickled, and a note of our own."""

    def __init__(self, note: str) -> None:
        self.note = note
        self.native = torch.classes.profiling._ScriptProfile()


def describe(x: Any) -> list[Any]:
    """What arrived: its type, whether it has a grad_fn, and what it carries."""
    return [type(x).__name__, getattr(x, "grad_fn", None) is not None, getattr(x, "note", None), getattr(x, "scale", None)]


def total(x: torch.Tensor) -> torch.Tensor:
    return (x * 3).sum()


def told(x: Any, *, kind: str, note: str | None = None, scale: float | None = None) -> None:
    """One case that is only sent and described; in a context of distributed autograd nothing is asked."""
    with attempt("send", case=kind) as made:
        name, has_grad_fn, its_note, its_scale = rpc.rpc_sync(PEER, describe, (x,))
        whole = (name, its_note, its_scale) == (type(x).__name__, note, scale)
        made.note(arrived=name, has_grad_fn=has_grad_fn, whole=whole)


def gradient(kind: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """One case whose gradient comes back over distributed autograd; 6 everywhere is right."""
    leaf = torch.ones(3, requires_grad=True)
    with attempt("gradient", case=kind) as made, dist_autograd.context() as context:
        answer = rpc.rpc_sync(PEER, total, (make(leaf),)).as_subclass(torch.Tensor)
        dist_autograd.backward(context, [answer])
        found = dist_autograd.get_gradients(context).get(leaf)
        made.note(right=found is not None and bool((found == 6).all()), lost=found is None)


def scaled(x: torch.Tensor) -> torch.Tensor:
    made = x.as_subclass(Scaled)
    made.scale = 5.0
    return made


def ask(plain: bool) -> None:
    told(torch.ones(3), kind="tensor")
    gradient("tensor", lambda leaf: leaf * 2)
    if plain:
        return
    told(scaled(torch.ones(3)), kind="subclass", scale=5.0)
    told(Double.apply(torch.ones(3, requires_grad=True)), kind="function")
    told(Profile("mine"), kind="bound", note="mine")
    gradient("function", Double.apply)
    gradient("subclass", lambda leaf: scaled(leaf * 2))
    told(torch.ones(3), kind="tensor again")


def registry() -> contextlib.AbstractContextManager[Any]:
    from dtprobe.framework.transport.serialise import Registry

    found = Registry()
    found.register_tensor(Scaled, attributes=("scale",))
    found.register(Profile, lambda profile: (profile.note,), Profile)
    found.allow(describe, total)
    return found.installed()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--registry", action="store_true")
    args = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # RPC's store would end with rank 0's shutdown, in which the other rank may still need it: RPC shares this one
    store = dist.TCPStore(host, port, size, True, wait_for_workers=False, multi_tenant=True) if rank == 0 else None
    url = f"tcp://{host}:{port}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=url, rpc_timeout=60)
    with registry() if args.registry else contextlib.nullcontext():
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
        if rank == 0:
            ask(args.plain)
        rpc.shutdown()
    together(size, patience_s=30)
    del store


if __name__ == "__main__":
    main()
