"""A job that makes group after group, and one rank with little room for open files.

The limit comes from the injector. Each way is tried in turn: `ended` makes each group through the framework's registry and ends it, `kept` makes them by
`new_group` and never ends one; that one comes last, since nothing can be opened afterwards.

By hand, once for each rank, of rank 1 under `ulimit -n 100`: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dtprobe import attempt
from dtprobe.framework.groups import Groups

START_S = 60.0


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def one_more(way: str, registry: Groups, number: int, timeout_s: float, kept: list[dist.ProcessGroup]) -> None:
    """Make a group and use it."""
    if way == "kept":
        kept.append(dist.new_group(timeout=timedelta(seconds=timeout_s)))
        dist.all_reduce(torch.ones(1), group=kept[-1])
        return
    with registry.scope(f"group-{number}", timeout_s=START_S) as group:
        dist.all_reduce(torch.ones(1), group=group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default="kept", help="ended, kept: in this order")
    parser.add_argument("--groups", type=int, default=25, help="so many are made in each way")
    parser.add_argument("--timeout-s", type=float, default=3.0)
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=START_S))
    registry = Groups(timeout_s=START_S)
    kept: list[dist.ProcessGroup] = []
    for way in args.ways.split(","):
        dist.barrier()
        before, done = descriptors(), 0
        spare = os.open(os.devnull, os.O_RDONLY)  # so that what happened can still be written down
        with attempt(f"groups {way}", asked=args.groups) as made:
            try:
                for done in range(args.groups):
                    one_more(way, registry, done, args.timeout_s, kept)
                done += 1
            finally:
                os.close(spare)
                made.note(done=done, grown=descriptors() - before)


if __name__ == "__main__":
    main()
