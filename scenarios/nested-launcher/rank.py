"""The program that torchrun starts: sums one over all ranks, as a stranger to how it was started would."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from dtprobe import attempt, record

DOCUMENTED = "_get_rank_from_env"
"""The function that the failure document blames."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=int, required=True)
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--resolve", action="store_true")
    args = parser.parse_args()
    found = any(hasattr(place, DOCUMENTED) for place in (dist, dist.distributed_c10d, dist.rendezvous))
    record("seen", task=args.task, env_rank=int(os.environ["RANK"]), env_world=int(os.environ["WORLD_SIZE"]), symbol=found)
    with attempt(f"sum {args.task}", right=float(args.tasks)) as made:
        if args.resolve:
            from dtprobe.framework import bootstrap

            bootstrap.resolve(os.environ)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        ones = torch.ones(1)
        dist.all_reduce(ones)
        made.note(value=ones.item())
        dist.destroy_process_group()
    sys.exit(2 if made.error else 0)


if __name__ == "__main__":
    main()
