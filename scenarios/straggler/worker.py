"""A training loop that says of each step how long its own work took and how long it then waited for the others.

The work is a number of small matrix products: the same in every step (`--batches constant`), or drawn anew each time from one
long-tailed distribution on all ranks (`--batches varied`), as with sentences that are not padded.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import os
import random
import time

import torch
import torch.distributed as dist

from dtprobe import attempt, record
from dtprobe.authoring.rendezvous import join

SIZE = 128
SPREAD = 0.8
"""Of the logarithm of a batch's length: its 95th percentile is 3.7 times the median."""
LONGEST = 15.0
"""Times the median: as long as the longest sentence of a corpus is."""


def lengths(kind: str, steps: int, products: int, rank: int, rng: random.Random) -> list[int]:
    """How many products each step has. Of ten varied batches in a row one on some rank is the longest that there is."""
    if kind == "constant":
        return [products] * steps
    drawn = [min(LONGEST, rng.lognormvariate(0.0, SPREAD)) for _ in range(steps)]
    longest = [step % 20 == (5 + 10 * rank) % 20 for step in range(steps)]
    return [max(1, round(products * (LONGEST if long else one))) for one, long in zip(drawn, longest, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batches", choices=("constant", "varied"), default="constant")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--products", type=int, default=1000)
    parser.add_argument("--timeout-s", type=float, default=60.0)
    args = parser.parse_args()
    rank = join(args.timeout_s, device=args.device)
    seed = int(os.environ.get("DTPROBE_SEED", "0"))
    rng = random.Random(f"{seed} {rank}")
    weights = torch.randn(SIZE, SIZE, device=args.device)
    gradient = torch.ones(1024, device=args.device)
    dist.all_reduce(gradient)
    began = time.monotonic()
    for step, products in enumerate(lengths(args.batches, args.steps, args.products, rank, rng)):
        with attempt("step", step=step) as made:
            start, cpu = time.perf_counter(), time.thread_time()
            for _ in range(products):
                torch.mm(weights, weights)
            if args.device == "cuda":
                torch.cuda.synchronize()
            worked, cpu = time.perf_counter(), time.thread_time() - cpu
            dist.all_reduce(gradient)
            if args.device == "cuda":
                torch.cuda.synchronize()  # else the wait for the others is found in the next step's work
            made.note(products=products, work_s=worked - start, cpu_s=cpu, wait_s=time.perf_counter() - worked)
        if made.error:
            raise SystemExit(f"step {step}: {made.error}: {made.text}")
    record("work", duration_s=time.monotonic() - began)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
