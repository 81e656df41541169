"""Two groups of the same members, which one rank creates in the other order. Then each is summed over.

Each way to make them is tried in turn: `none` is `new_group`, `detail` the same under torch's own checks, `create` the framework's
registry in the order in which the rank asks, `create_all` the registry given both at once.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --swap-rank 1`
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from dtprobe import attempt
from dtprobe.authoring.rendezvous import join

UNITS = {"small": 1.0, "large": 100.0}
"""Name of each group -> what rank 0 brings to its sum; rank r brings r+1 times as much."""

START_S = 60.0


def made(way: str, order: list[str], timeout_s: float, trial: int) -> Mapping[str, dist.ProcessGroup]:
    """The groups by name, made in that order."""
    if way in ("none", "detail"):
        dist.set_debug_level(dist.DebugLevel.DETAIL if way == "detail" else dist.DebugLevel.OFF)
        return {name: dist.new_group(timeout=timedelta(seconds=timeout_s), group_desc=name) for name in order}
    from dtprobe.framework.groups import Groups

    dist.barrier()  # all have imported it
    groups = Groups(timeout_s=START_S)
    everyone = list(range(dist.get_world_size()))
    if way == "create":
        for name in order:
            groups.create(f"{name}-{trial}", everyone)
    else:
        groups.create_all({f"{name}-{trial}": everyone for name in order})
    return {name: groups[f"{name}-{trial}"] for name in UNITS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swap-rank", type=int, default=-1, help="this rank creates the groups in the other order; -1: none")
    parser.add_argument("--ways", default="none", help="none, detail, create, create_all: in this order")
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=10.0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    device, rank = args.device, join(START_S, device=args.device)
    size = dist.get_world_size()
    order = list(UNITS)[::-1] if rank == args.swap_rank else list(UNITS)
    for trial in range(args.trials):
        for way in args.ways.split(","):
            dist.barrier()  # the default group keeps the ranks together
            groups: Mapping[str, dist.ProcessGroup] = {}
            with attempt("make", way=way):
                groups = made(way, order, args.timeout_s, trial)
            # both at once, as reductions that overlap are: with a wait between them the swapped groups would deadlock instead
            tensors = {name: torch.full((1,), UNITS[name] * (rank + 1), device=device) for name in groups}
            works = {name: dist.all_reduce(tensors[name], group=groups[name], async_op=True) for name in groups}
            for name, work in works.items():
                with attempt("sum", way=way, group=name) as one:
                    work.wait()
                    one.note(value=tensors[name].item(), right=UNITS[name] * sum(range(1, size + 1)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
