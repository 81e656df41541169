"""Run by mpirun: what a rank is told when another one does wrong. What each rank was told is said.

mpirun --with-ft ulfm -n 3 python mpi_faults.py WHAT
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from dtprobe.errors import DtprobeError
from dtprobe.framework.transport import mpi


def say(**facts: object) -> None:
    sys.stdout.write("say " + json.dumps({"rank": dist.get_rank() if dist.is_initialized() else None, **facts}) + "\n")
    sys.stdout.flush()


def caught(call: Callable[[], object]) -> dict[str, object]:
    begun = time.monotonic()
    try:
        call()
    except (DtprobeError, RuntimeError) as error:
        took = time.monotonic() - begun
        return {"error": type(error).__name__, "text": str(error), "ranks": list(getattr(error, "ranks", ())), "took_s": took}
    return {"error": None, "took_s": time.monotonic() - begun}


def begin(timeout_s: float) -> int:
    mpi.register()
    dist.init_process_group(mpi.NAME, timeout=datetime.timedelta(seconds=timeout_s))
    dist.all_reduce(torch.ones(1))
    return dist.get_rank()


def refused() -> None:
    """What is refused before anything is sent, with the group as good as before."""
    rank = begin(20)
    pair = dist.new_group([0, 1])
    x = torch.ones(4)
    attempts: dict[str, Callable[[], object]] = {
        "bits of floats": lambda: dist.all_reduce(x, dist.ReduceOp.BAND),
        "mean of integers": lambda: dist.all_reduce(torch.ones(4, dtype=torch.int64), dist.ReduceOp.AVG),
        "float8": lambda: dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fn)),
        "sparse": lambda: dist.all_reduce(torch.ones(4).to_sparse()),
        "elsewhere": lambda: dist.group.WORLD.allreduce([torch.ones(4, device="meta")]),  # type: ignore[union-attr]
        "unequal parts": lambda: dist.all_gather_into_tensor(torch.ones(5), x),
        "two dtypes": lambda: dist.group.WORLD.allgather([[x, x.double(), x]], [x]),  # type: ignore[union-attr]
        "splits": lambda: dist.all_to_all_single(torch.ones(6), torch.ones(6), [1, 1, 1], [2, 2, 2]),
    }
    said = {name: caught(attempt) for name, attempt in attempts.items()}
    said["too long a message"] = caught(lambda: dist.send(torch.ones(9), 0, tag=1)) if rank == 1 else {}
    if rank == 0:
        said["too long a message"] = caught(lambda: dist.recv(torch.ones(3), 1, tag=1))
        said["too short a message"] = caught(lambda: dist.recv(torch.ones(3), 1, tag=2))
    elif rank == 1:
        dist.send(torch.ones(2), 0, tag=2)
    dist.all_reduce(x)
    made = dist.group.WORLD.split_group([2, 0], group_name="turned")  # type: ignore[union-attr]
    order = [torch.zeros(1), torch.zeros(1)]
    if made is not None:
        made.allgather([order], [torch.tensor([float(rank)])]).wait()
    if rank < 2:
        dist.destroy_process_group(pair)
        said["after the end"] = caught(lambda: pair.allreduce([torch.ones(1)]))
    say(**said, sum=x[0].item(), turned=[each.item() for each in order])
    dist.destroy_process_group()


def late() -> None:
    """Rank 1 does not join a collective of the world; a sub-group without it goes on."""
    rank = begin(2)
    others = dist.new_group([0, 2])
    later = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=20))
    receive = caught(lambda: dist.recv(torch.ones(1), 1, tag=5)) if rank == 0 else None
    dist.all_reduce(torch.ones(1), group=later)
    if rank == 1:
        dist.barrier(group=later)
    told = caught(lambda: dist.all_reduce(torch.ones(3)))
    again = caught(lambda: dist.all_reduce(torch.ones(3)))
    x = torch.ones(1)
    if rank != 1:
        dist.all_reduce(x, group=others)
        dist.barrier(group=later)
    say(receive=receive, told=told, again=again, sum=x.item())


def killed() -> None:
    """Rank 1 dies while the others are in a DDP step."""
    rank = begin(30)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.ones(1, 4)).sum().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = caught(lambda: model(torch.ones(1, 4)).sum().backward())
    say(backward=told, after=caught(lambda: dist.all_reduce(torch.ones(1))))
    sys.exit(7)


def left() -> None:
    """Rank 1 ends by an exception of its own."""
    if begin(30) == 1:
        sys.exit("out of memory, say")
    say(told=caught(lambda: dist.all_reduce(torch.ones(1))))


def turned() -> None:
    """Ranks that torch numbers in another order than MPI."""
    where = mpi.register()
    rank = where.world_size - 1 - where.rank
    init = lambda: dist.init_process_group(mpi.NAME, rank=rank, world_size=where.world_size)  # noqa: E731
    say(**caught(init))


def absent() -> None:
    """Rank 1 never calls register()."""
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        time.sleep(6)
        return
    say(**caught(lambda: mpi.register(timeout_s=2)))


def funneled() -> None:
    """A program that initialised MPI without threads."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    say(level=MPI.Query_thread() == MPI.THREAD_FUNNELED, **caught(mpi.register))


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
