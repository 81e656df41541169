"""Ranks with a short default timeout, a group made of them, and a rank that comes late to that group's all-reduce.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --group new_group`
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtprobe import attempt, record
from dtprobe.authoring.rendezvous import join

START_S = 60.0


def made(how: str, timeout_s: float, trial: int) -> dist.ProcessGroup:
    """A group of all ranks: `new_group` without a timeout, `explicit` with one, or made by the `registry`, which passes its own on."""
    if how == "new_group":
        return dist.new_group()
    if how == "explicit":
        return dist.new_group(timeout=timedelta(seconds=timeout_s))
    from dtprobe.framework.groups import Groups

    dist.barrier()  # all have imported it
    groups = Groups(timeout_s=START_S)
    group = groups.create(f"made-{trial}", timeout_s=timeout_s)
    assert group is not None
    return group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", default="new_group", help="new_group, explicit, registry: one of each, in this order")
    parser.add_argument("--trials", type=int, default=2, help="rounds over the groups")
    parser.add_argument("--timeout-s", type=float, default=1.5, help="of the default group")
    parser.add_argument("--late-s", type=float, default=0.0, help="so late the last rank comes to the all-reduce")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    device, rank = args.device, join(START_S, device=args.device)
    size = dist.get_world_size()
    for trial in range(args.trials):
        for how in args.groups.split(","):
            c10d._set_pg_timeout(timedelta(seconds=args.timeout_s))  # as if given to init_process_group, once all have started
            group = made(how, args.timeout_s, trial)
            options = group._get_backend(torch.device(device)).options
            record("timeout", how=how, group_s=options._timeout.total_seconds(), default_s=args.timeout_s)
            c10d._set_pg_timeout(timedelta(seconds=START_S))
            dist.barrier()
            if rank == size - 1:
                time.sleep(args.late_s)
            with attempt("all_reduce", how=how, late=rank == size - 1):
                dist.all_reduce(torch.ones(1, device=device), group=group)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
