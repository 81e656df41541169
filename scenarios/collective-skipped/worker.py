"""A training loop whose ranks reduce once a step, and one rank that leaves out one of the reductions.

Modes: `full` leaves out nothing. `away` leaves out one all-reduce and spends the time elsewhere, as a rank-dependent branch
does. `shifted` leaves it out and goes on with the next step. `--checked` runs each step under `dtprobe.framework.checked`.

By hand, once for each rank: `RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --mode away`
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtprobe import record


def evaluate(seconds: float) -> None:
    """What the rank does that should have reduced: an evaluation that only it runs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.05)


@contextlib.contextmanager
def checking(wanted: bool, timeout_s: float) -> Iterator[Callable[[], None]]:
    """Yields what to call at the end of each step: nothing, or the agreement that all ranks made the same calls in it."""
    if not wanted:
        yield lambda: None
        return
    from dtprobe.framework.checked import checked

    dist.barrier()  # all have imported it: from here on the deadline measures the loop alone
    with checked(timeout_s=timeout_s) as group:
        yield group.finish


def train(args: argparse.Namespace, rank: int, device: str) -> None:
    """The loop; raises what a step raises, having recorded it."""
    gradient = torch.zeros(4096, device=device)
    weights = torch.randn(384, 384, device=device)
    ranks = dist.get_world_size()
    with checking(args.checked, args.check_timeout_s) as end_of_step:
        for step in range(args.steps):
            torch.mm(weights, weights)
            gradient.fill_(float((rank + 1) * (step + 1)))
            skips = args.mode != "full" and rank == args.skip_rank and step == args.skip_step
            began = time.monotonic()
            try:
                if skips:
                    record("skipped", step=step)
                    if args.mode == "away":
                        evaluate(args.away_s)
                        began = time.monotonic()
                else:
                    dist.all_reduce(gradient)
                end_of_step()
            except Exception as error:
                report(error, step, time.monotonic() - began)
                raise
            if not skips:
                record("step", step=step, sum=gradient[0].item(), right=float(sum(range(1, ranks + 1)) * (step + 1)))


def leave_last(rank: int, patience_s: float) -> None:
    """Rank 0 hosts the store: it stays until the others have gone, or for `patience_s`."""
    store = c10d._get_default_store()
    with contextlib.suppress(dist.DistError):
        if rank == 0:
            store.wait([f"left/{one}" for one in range(1, dist.get_world_size())], timedelta(seconds=patience_s))
        else:
            store.set(f"left/{rank}", "")


def report(error: Exception, step: int, waited_s: float) -> None:
    ranks = getattr(error, "ranks", None)
    record(
        "error",
        step=step,
        waited_s=waited_s,
        type=type(error).__name__,
        text=str(error),
        named=",".join(map(str, ranks)) if ranks is not None else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("full", "away", "shifted"), default="full")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip-rank", type=int, default=1)
    parser.add_argument("--skip-step", type=int, default=30)
    parser.add_argument("--timeout-s", type=float, default=3.5)
    parser.add_argument("--away-s", type=float, default=4.5, help="longer than the timeout: nobody comes to the rescue")
    parser.add_argument("--checked", action="store_true")
    parser.add_argument("--check-timeout-s", type=float, default=1.5)
    args = parser.parse_args()
    device = "cpu"
    if args.backend == "nccl":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend, timeout=timedelta(seconds=args.timeout_s))
    rank = dist.get_rank()
    began = time.monotonic()
    try:
        train(args, rank, device)
        record("work", duration_s=time.monotonic() - began)
        if args.mode == "shifted" and rank == args.skip_rank:
            evaluate(args.away_s)  # its steps are done, and the others still wait for it
    finally:
        leave_last(rank, args.away_s + 2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
