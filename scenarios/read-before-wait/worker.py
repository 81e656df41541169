"""A rank that uses the tensor of a collective or a send at the wrong moment, by each of several patterns.

In each trial one rank is ahead: it issues the operation and does what the pattern says. The other comes to it once the first says
that it may, or after two seconds where the first is waiting for it; so nothing depends on who is faster.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --patterns early`
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from dtprobe import attempt
from dtprobe.authoring.rendezvous import join

PATIENCE_S = 2.0
JUNK = -100.0

Free = Callable[[], None]
"""Called by the rank that is ahead when the other may come."""


def brought(rank: int, device: str, elements: int) -> torch.Tensor:
    return torch.full((elements,), float(rank + 1), device=device)


def waited(x: torch.Tensor, free: Free) -> torch.Tensor:
    work = dist.all_reduce(x, async_op=True)
    free()
    work.wait()
    return x.clone()


def plain(x: torch.Tensor, free: Free) -> torch.Tensor:
    dist.all_reduce(x)
    return x.clone()


def early(x: torch.Tensor, free: Free) -> torch.Tensor:
    work = dist.all_reduce(x, async_op=True)
    read = x.clone()
    free()
    work.wait()
    return read


def overwritten(x: torch.Tensor, free: Free) -> torch.Tensor:
    work = dist.all_reduce(x, async_op=True)
    x.fill_(JUNK)  # the buffer is wanted for the next batch
    free()
    work.wait()
    return x.clone()


def by_function(x: torch.Tensor, free: Free) -> torch.Tensor:
    return functional.all_reduce(x, "sum", c10d._get_default_group()) + 0  # waits by itself, at the first use


def by_function_overwritten(x: torch.Tensor, free: Free) -> torch.Tensor:
    result = functional.all_reduce(x, "sum", c10d._get_default_group())
    x.fill_(JUNK)
    free()
    return result + 0


def sent(x: torch.Tensor, free: Free) -> torch.Tensor:
    work = dist.isend(x, 1)
    free()
    work.wait()
    x.fill_(JUNK)
    return x


def sent_early(x: torch.Tensor, free: Free) -> torch.Tensor:
    work = dist.isend(x, 1)
    x.fill_(JUNK)
    free()
    work.wait()
    return x


REDUCING = (waited, plain, early, overwritten, by_function, by_function_overwritten)
SENDING = (sent, sent_early)
PATTERNS = {pattern.__name__: pattern for pattern in (*REDUCING, *SENDING)}
EXCHANGED = "exchanged"
"""As `sent_early`, over the framework's pipeline exchange."""


def come(key: str) -> None:
    """Wait until the rank that is ahead says that one may come, or is waiting itself."""
    with contextlib.suppress(dist.DistError):
        c10d._get_default_store().wait([key], timedelta(seconds=PATIENCE_S))


def trial(name: str, number: int, rank: int, device: str, elements: int) -> None:
    key = f"free/{name}/{number}"
    pattern = PATTERNS[name]
    sends = pattern in SENDING
    ahead = rank == (0 if sends else number % 2)
    x = brought(rank, device, elements)
    with attempt(name, trial=number, ahead=ahead) as made:
        if ahead:
            result = pattern(x, lambda: c10d._get_default_store().set(key, ""))
        else:
            come(key)
            result = x
            dist.recv(x, 0) if sends else dist.all_reduce(x)
        wanted = 1.0 if sends else 3.0
        made.note(wrong=int((result != wanted).sum()), own=bool((result == rank + 1.0).all()), value=result[0].item())


def exchange(trials: int, rank: int, elements: int) -> None:
    from dtprobe.framework.groups import Groups
    from dtprobe.framework.pipeline import Exchange, Transfer

    with Groups() as groups, groups.scope("exchange") as group, Exchange(group, timeout_s=20) as exchanging:
        for number in range(trials):
            dist.barrier()
            key = f"free/{EXCHANGED}/{number}"
            x = brought(rank, "cpu", elements)
            direction = "send" if rank == 0 else "receive"
            with attempt(EXCHANGED, trial=number, ahead=rank == 0) as made:
                if rank == 1:
                    come(key)
                handles = exchanging.post([Transfer(direction, 1 - rank, number, "forward", x)])
                if rank == 0:
                    x.fill_(JUNK)
                    c10d._get_default_store().set(key, "")
                exchanging.wait(handles)
                made.note(wrong=int((x != 1.0).sum()), value=x[0].item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patterns", default="waited", help=f"{', '.join([*PATTERNS, EXCHANGED])}: one after the other")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--elements", type=int, default=1024, help="of the tensor, float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    rank = join(30.0, device=args.device)
    for name in args.patterns.split(","):
        if name == EXCHANGED:
            exchange(args.trials, rank, args.elements)
            continue
        for number in range(args.trials):
            dist.barrier()
            trial(name, number, rank, args.device, args.elements)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
