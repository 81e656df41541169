"""A start with a network interface that one rank does not have: GLOO_SOCKET_IFNAME comes from the environment.

`--start torch` is init_process_group, `--start framework` is `dtprobe.framework.bootstrap`.

By hand, once for each rank, of rank 1 with `GLOO_SOCKET_IFNAME=nope0`: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from dtprobe import attempt
from dtprobe.framework import bootstrap
from dtprobe.worker import together


def start(how: str, timeout_s: float) -> float:
    """Start, sum the ranks' ones, end."""
    tensor = torch.ones(1)
    if how == "torch":
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return tensor.item()
    with bootstrap.start(deadline_s=timeout_s, timeout_s=timeout_s):
        dist.all_reduce(tensor)
    return tensor.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", choices=("torch", "framework"), default="torch")
    parser.add_argument("--timeout-s", type=float, default=4.0)
    args = parser.parse_args()
    together(int(os.environ["WORLD_SIZE"]), patience_s=60.0)
    with attempt("start", how=args.start) as made:
        try:
            made.note(sum=start(args.start, args.timeout_s))
        except Exception as error:
            made.note(named=",".join(map(str, getattr(error, "ranks", ()))))
            raise
    together(int(os.environ["WORLD_SIZE"]), patience_s=60.0, mark="end")  # rank 0 serves the store: it goes last


if __name__ == "__main__":
    main()
