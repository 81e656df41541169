"""All ranks reduce once a step, a few numbers at first and many later, over a network that may begin to swallow packets.

By hand, once for each rank: `RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

from dtprobe import attempt, record
from dtprobe.authoring.rendezvous import join

SMALL_STEPS = 10
FEW = 4
MANY = 65536
"""So many floats fill many packets; a few fit into one of any size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--for-s", type=float, default=2.0, help="so long rank 0 goes on, and the others with it")
    parser.add_argument("--timeout-s", type=float, default=6.0)
    args = parser.parse_args()
    rank = join(args.timeout_s, device=args.device)
    began = time.monotonic()
    step, last = 0, False
    while not last:
        with attempt("step", step=step) as made:
            gradient = torch.zeros(FEW if step < SMALL_STEPS else MANY, device=args.device)
            gradient[0] = float(rank == 0 and time.monotonic() - began > args.for_s)
            dist.all_reduce(gradient)
            last = gradient[0].item() > 0
        if made.error:
            raise SystemExit(f"step {step}: {made.error}: {made.text}")
        step += 1
        time.sleep(0.05)
    record("work", duration_s=time.monotonic() - began)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
