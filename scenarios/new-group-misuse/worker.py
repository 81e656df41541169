"""A group that not all ranks create, or that they create with different members.

`--misuse one-rank`: only rank 0 calls `new_group`. `--misuse rank-lists`: rank 1 leaves rank 0 out of the list. Each way is tried in turn: `none` is
`new_group`, `registry` is the framework's.

By hand, once for each rank: `RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --misuse one-rank`
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist

from dtprobe import attempt
from dtprobe.authoring.rendezvous import join

START_S = 60.0


def use(way: str, ranks: list[int], timeout_s: float, device: str) -> float:
    """Make the group and sum the ranks' ones over it."""
    if way == "none":
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
        tensor = torch.ones(1, device=device)
        dist.all_reduce(tensor, group=group)
        return tensor.item()
    from dtprobe.framework.groups import Groups

    with Groups(timeout_s=timeout_s) as groups, groups.scope("members", ranks) as scoped:
        tensor = torch.ones(1, device=device)
        dist.all_reduce(tensor, group=scoped)
        return tensor.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--misuse", choices=("none", "one-rank", "rank-lists"), default="none")
    parser.add_argument("--ways", default="none", help="none, registry: in this order")
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=2.0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    device, rank = args.device, join(START_S, device=args.device)
    size = dist.get_world_size()
    ranks = list(range(1 if args.misuse == "rank-lists" and rank == 1 else 0, size))
    for way in args.ways.split(",") * args.trials:
        if way == "registry":
            import dtprobe.framework.groups  # noqa: F401  its import is no part of the try
        dist.barrier()  # the default group keeps the ranks together
        if args.misuse == "one-rank" and rank != 0:
            continue
        with attempt("use", way=way, right=float(size)) as made:
            try:
                made.note(sum=use(way, ranks, args.timeout_s, device))
            except Exception as error:
                made.note(named=",".join(map(str, getattr(error, "ranks", ()))))
                raise
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
