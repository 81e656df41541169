"""Rank 0, which hosts the store, may leave; the other two go on alone: they make a group and reduce over it.

`--cured` starts the job over a folder, `dtprobe.framework.bootstrap.start(folder=...)`: then no rank hosts the store. An injector
ends rank 0 in its own work, at the barrier of the group `own`.

By hand, once for each rank: `RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from dtprobe import attempt, record
from dtprobe.authoring.rendezvous import COME_S, join
from dtprobe.framework.bootstrap import resolve, start
from dtprobe.framework.errors import MissingRanks

PAUSE_S = 1.0


@contextlib.contextmanager
def joined(args: argparse.Namespace) -> Iterator[int]:
    """A default group over rank 0's TCPStore, or over files that belong to nobody."""
    if not args.cured:
        yield join(args.timeout_s, device=args.device)
        return
    placement = resolve(os.environ)
    backend = "nccl" if args.device == "cuda" else "gloo"
    folder = Path(os.environ["DTPROBE_SCRATCH"], f"store-{os.environ['MASTER_PORT']}")
    folder.mkdir(exist_ok=True)
    with (
        contextlib.suppress(MissingRanks),  # at the end of the job it is said that rank 0 is gone: these two know it
        start(placement, backend=backend, deadline_s=args.deadline_s, timeout_s=args.timeout_s, folder=folder),
    ):
        yield placement.rank


def go_on(rank: int, device: str) -> None:
    """What needs the store: a new group, of the ranks that are left."""
    if rank == 0:
        return
    time.sleep(PAUSE_S)  # rank 0, where it leaves, is gone by now
    value = torch.full((4,), float(rank), device=device)
    with attempt("go on") as made:
        left = dist.new_group([1, 2], use_local_synchronization=True)
        dist.all_reduce(value, group=left)
        made.note(sum=value[0].item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--timeout-s", type=float, default=10.0)
    parser.add_argument("--deadline-s", type=float, default=COME_S)
    parser.add_argument("--cured", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    with joined(args) as rank:
        value = torch.ones(4, device=args.device)
        own = dist.new_group([rank], use_local_synchronization=True, group_desc="own")
        for _ in range(3):
            dist.all_reduce(value)
        dist.barrier(group=own)
        go_on(rank, args.device)
        if rank == 0:
            time.sleep(3 * PAUSE_S)  # as long as it stays, the store does
    record("work", duration_s=time.monotonic() - began)


if __name__ == "__main__":
    main()
