"""Two ranks on two hosts train until one raises; each writes into its log when it failed, by its own clock.

`--cured`: before it begins each rank measures over the store how far its clock is from rank 0's, and stamps its log accordingly.
An injector sets the clock of the second host.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time

import torch
import torch.distributed as dist

from dtprobe import record
from dtprobe.authoring.rendezvous import join
from dtprobe.doctor.cluster.clocks import between

STEPS = 4
EXCHANGES = 16
CULPRIT = 1
CLEANUP_S = 0.3
"""So long the rank that failed takes to leave, and the other one to notice."""


def offset_ns(rank: int, store: dist.Store) -> int:
    """What this rank adds to its stamps to put them on rank 0's clock: exchanges over the store, the quickest counts."""
    stamps = []
    for number in range(EXCHANGES):
        asked, answer = f"asked/{number}", f"answer/{number}"
        if rank == 0:
            store.get(asked)
            store.set(answer, f"{time.time_ns()} {time.time_ns()}")
            continue
        left = time.time_ns()
        store.set(asked, "")
        came, sent = map(int, store.get(answer).split())
        stamps.append((left, came, sent, time.time_ns()))
    if not stamps:
        return 0
    ahead_s, uncertainty_s = between(stamps)
    record("offset", offset_s=ahead_s, uncertainty_s=uncertainty_s)
    return round(ahead_s * 1e9)


def train(rank: int, device: str) -> None:
    """Steps of an all-reduce each; in the last one the culprit meets a record that it cannot read."""
    for step in range(STEPS):
        if rank == CULPRIT and step == STEPS - 1:
            raise ValueError("record 4711 is no example: 3 fields, not 4")
        dist.all_reduce(torch.ones(4, device=device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--timeout-s", type=float, default=20.0)
    parser.add_argument("--cured", action="store_true")
    args = parser.parse_args()
    rank = join(args.timeout_s, device=args.device)
    store = dist.PrefixStore("clocks", dist.distributed_c10d._get_default_store())
    added_ns = offset_ns(rank, store) if args.cured else 0
    dist.barrier()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        train(rank, args.device)
    except (ValueError, RuntimeError) as error:
        stamp_ns = time.time_ns() + added_ns
        told = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(stamp_ns / 1e9)) + f".{stamp_ns // 1000 % 1000000:06}"
        logging.error(f"{told} {os.uname().nodename} [rank{rank}]: {type(error).__name__}: {str(error).splitlines()[0]}")
        record("failed", stamp_ns=stamp_ns, error=type(error).__name__, text=str(error)[:300])
        time.sleep(CLEANUP_S)
        sys.exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
