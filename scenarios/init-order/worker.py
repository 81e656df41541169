"""The start of a job, in an order or with a size that cannot complete.

`--order store-first` is the right one. `late-store` makes rank 0 do something else first, so that nobody serves the store. A world size larger than the
number of ranks comes from the environment. `--start framework` starts through `dtprobe.framework.bootstrap`.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --order late-store`
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from dtprobe import attempt, record
from dtprobe.worker import together

DOCUMENTED = "_test_set_default_backend"
"""The function that the failure document says deadlocks."""


def start(how: str, backend: str, timeout_s: float) -> None:
    """Start, reduce once, end."""
    if how == "torch":
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        dist.all_reduce(torch.ones(1, device="cuda" if backend == "nccl" else "cpu"))
        dist.destroy_process_group()
        return
    from dtprobe.framework import bootstrap

    with bootstrap.start(backend=backend, deadline_s=timeout_s, timeout_s=timeout_s):
        dist.all_reduce(torch.ones(1, device="cuda" if backend == "nccl" else "cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--order", choices=("store-first", "late-store"), default="store-first")
    parser.add_argument("--start", choices=("torch", "framework"), default="torch")
    parser.add_argument("--ranks", type=int, default=3, help="so many ranks are really started")
    parser.add_argument("--timeout-s", type=float, default=3.0)
    parser.add_argument("--busy-s", type=float, default=8.0, help="longer than the others' patience")
    parser.add_argument("--backend", default="gloo")
    args = parser.parse_args()
    record(
        "symbol",
        name=DOCUMENTED,
        found=any(hasattr(place, DOCUMENTED) for place in (dist, dist.distributed_c10d, torch._C._distributed_c10d)),
    )
    if args.start == "framework":
        from dtprobe.framework import bootstrap  # noqa: F401  its import is no part of the start
    together(args.ranks, patience_s=60.0)
    if args.order == "late-store" and os.environ["RANK"] == "0":
        time.sleep(args.busy_s)  # the others give up in this time
        return
    with attempt("start", how=args.start) as made:
        try:
            start(args.start, args.backend, args.timeout_s)
        except Exception as error:
            made.note(named=",".join(map(str, getattr(error, "ranks", ()))))
            raise


if __name__ == "__main__":
    main()
