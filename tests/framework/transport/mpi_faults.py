"""Run by mpirun: what a rank is told when another one does wrong. What each rank was told is said.

mpirun --with-ft ulfm -n 3 python mpi_faults.py WHAT
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dtprobe.errors import DtprobeError
from dtprobe.framework.transport import mpi


def caught(call: Callable[[], object]) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        call()
    except (DtprobeError, RuntimeError) as error:
        took = time.monotonic() - begun
        return {"error": type(error).__name__, "text": str(error), "ranks": list(getattr(error, "ranks", ())), "took_s": took}
    return {"error": None, "took_s": time.monotonic() - begun}


def refused() -> dict[str, Any]:
    """What is refused before anything is sent, with the group as good as before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 1])
    x = torch.ones(4)
    attempts: dict[str, Callable[[], object]] = {
        "bits of floats": lambda: dist.all_reduce(x, dist.ReduceOp.BAND),
        "mean of integers": lambda: dist.all_reduce(torch.ones(4, dtype=torch.int64), dist.ReduceOp.AVG),
        "float8": lambda: dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fn)),
        "sparse": lambda: dist.all_reduce(torch.ones(4).to_sparse()),
        "elsewhere": lambda: dist.group.WORLD.allreduce([torch.ones(4, device="meta")]),  # type: ignore[union-attr]
        "unequal parts": lambda: dist.all_gather_into_tensor(torch.ones(5), x),
        "two dtypes": lambda: dist.group.WORLD.allgather([[x.double()] * size], [x]),  # type: ignore[union-attr]
        "splits": lambda: dist.all_to_all_single(torch.ones(2 * size), torch.ones(2 * size), [1] * size, [2] * size),
    }
    said = {name: caught(attempt) for name, attempt in attempts.items()}
    room = torch.zeros(60_000)
    if rank == 1:
        dist.send(torch.ones(30_000), 0, tag=1)
    if rank == 0:
        said["too long a message"] = caught(lambda: dist.recv(room[:10_000], 1, tag=1))
        said["too long a message"]["overwritten"] = int(room.count_nonzero())
        said["too short a message"] = caught(lambda: dist.recv(torch.ones(3), 1, tag=2))
    elif rank == 1:
        dist.send(torch.ones(2), 0, tag=2)
    dist.all_reduce(x)
    uneven = dist.new_group()
    said["other sizes"] = caught(lambda: dist.all_reduce(torch.ones(20_000 + 4 * (rank == 2)), group=uneven))
    made = dist.group.WORLD.split_group([2, 0], group_name="turned")  # type: ignore[union-attr]
    order = [torch.zeros(1), torch.zeros(1)]
    if made is not None:
        made.allgather([order], [torch.tensor([float(rank)])]).wait()
    if rank < 2:
        dist.destroy_process_group(pair)
        said["after the end"] = caught(lambda: pair.allreduce([torch.ones(1)]))
    return {"told": said, "sum": x[0].item(), "turned": [each.item() for each in order]}


def late() -> dict[str, Any]:
    """Rank 1 does not join a collective of one group; the other groups go on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    short = dist.new_group(timeout=datetime.timedelta(seconds=1.5))
    waiting = dist.irecv(torch.ones(1), 1, group=short, tag=5) if rank == 0 else None
    dist.barrier()
    if rank == 1:
        time.sleep(2)  # awake or asleep, its engine answers
    told = caught(lambda: dist.all_reduce(torch.ones(3), group=short))
    receive = caught(waiting.wait) if waiting is not None else {}
    again = caught(lambda: dist.all_reduce(torch.ones(3), group=short))
    x = torch.ones(1)
    dist.all_reduce(x)
    return {"receive": receive, "told": told, "again": again, "sum": x.item() / size}


def killed() -> dict[str, Any]:
    """Rank 1 dies while the others are in a DDP step."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.ones(1, 4)).sum().backward()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = caught(lambda: model(torch.ones(1, 4)).sum().backward())
    return {"backward": told, "after": caught(lambda: dist.all_reduce(torch.ones(1)))}


def left() -> dict[str, Any]:
    """Rank 1 ends by an exception of its own, with a receive under way, as a rank does that fails in its backward pass."""
    if dist.get_rank() == 1:
        dist.irecv(torch.ones(1), 0, tag=9)
        sys.exit("out of memory, say")
    return caught(lambda: dist.all_reduce(torch.ones(1)))


def turned(store: dist.Store, rank: int, size: int) -> dict[str, Any]:
    """torch is told to number the ranks in another order than MPI."""
    return caught(lambda: dist.init_process_group(mpi.NAME, store=store, rank=size - 1 - rank, world_size=size))
