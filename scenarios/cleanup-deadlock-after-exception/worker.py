"""Training whose cleanup meets the other ranks: a barrier in `finally` before the group is destroyed.

An injector raises an exception on one rank, in its own work (the barrier of the group `own`). `--cured` trains in a
`dtprobe.framework.bootstrap` job, whose end tells the others that a rank left, and waits for nobody.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist

from dtprobe import attempt, record
from dtprobe.authoring.rendezvous import COME_S, join
from dtprobe.framework.bootstrap import resolve, start


def train(steps: int, rank: int, device: str) -> None:
    own = dist.new_group([rank], use_local_synchronization=True, group_desc="own")
    gradient = torch.ones(1024, device=device)
    for _ in range(steps):
        try:
            dist.barrier(group=own)
            dist.all_reduce(gradient)
        except Exception as error:
            record("raised", type=type(error).__name__)
            raise


def cleaned(args: argparse.Namespace) -> None:
    """As many training scripts do it: everybody meets once more, then the group goes."""
    rank = join(args.timeout_s, device=args.device)
    with attempt("job"):
        try:
            train(args.steps, rank, args.device)
        finally:
            dist.barrier()
            dist.destroy_process_group()


def job(args: argparse.Namespace) -> None:
    backend = "nccl" if args.device == "cuda" else "gloo"
    placement = resolve(os.environ)
    with attempt("job"), start(placement, backend=backend, deadline_s=COME_S, timeout_s=args.timeout_s):
        train(args.steps, placement.rank, args.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--cured", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    (job if args.cured else cleaned)(args)
    record("left")
    record("work", duration_s=time.monotonic() - began)


if __name__ == "__main__":
    main()
