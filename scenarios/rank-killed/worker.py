"""A training loop that reduces once a step, to which an injector does something on one rank.

Faults by count are aimed at the barrier of the group `own`, which has this rank alone as a member: they hit the rank in its
own work, between two reductions. `--checked` runs the steps under `dtprobe.framework.checked`. `--grow-mib` makes rank 1 take
that much more memory in the middle. A Python thread says every `--beat-s` that Python runs, where that is asked for.

By hand, once for each rank: `RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from dtprobe import attempt, record
from dtprobe.authoring.rendezvous import join

GROWS = 1
GROWS_AT = 12


@contextlib.contextmanager
def checking(wanted: bool, timeout_s: float) -> Iterator[None]:
    if not wanted:
        yield
        return
    from dtprobe.framework.checked import checked

    dist.barrier()  # all have imported it: from here on the deadline measures the loop alone
    with checked(timeout_s=timeout_s):
        yield


@contextlib.contextmanager
def beating(every_s: float) -> Iterator[None]:
    """A watchdog as training frameworks have it: a Python thread, so it runs when Python runs."""
    over = threading.Event()

    def beat() -> None:
        record("beat")  # at once: the fault may come within the first interval
        while not over.wait(every_s):
            record("beat")

    thread = threading.Thread(target=beat, name="watchdog", daemon=True)
    if every_s:
        thread.start()
    yield
    over.set()
    if every_s:
        thread.join()


def train(args: argparse.Namespace, rank: int) -> None:
    """The steps; ends the program, with the reason, at the first that fails."""
    gradient = torch.zeros(4096, device=args.device)
    weights = torch.randn(256, 256, device=args.device)
    own = dist.new_group([rank], use_local_synchronization=True, group_desc="own")
    held = []
    with checking(args.checked, args.check_timeout_s), beating(args.beat_s):
        for step in range(args.steps):
            with attempt("step", step=step) as made:
                torch.mm(weights, weights)
                dist.barrier(group=own)
                if args.grow_mib and rank == GROWS and step >= GROWS_AT:
                    held.append(torch.ones(args.grow_mib << 18, dtype=torch.float32))
                    args.grow_mib = 0
                gradient.fill_(float(rank + 1))
                dist.all_reduce(gradient)
            if made.error:
                raise SystemExit(f"step {step}: {made.error}: {made.text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--timeout-s", type=float, default=20.0)
    parser.add_argument("--checked", action="store_true")
    parser.add_argument("--check-timeout-s", type=float, default=2.5)
    parser.add_argument("--grow-mib", type=int, default=0)
    parser.add_argument("--beat-s", type=float, default=0.0)
    args = parser.parse_args()
    rank = join(args.timeout_s, device=args.device)
    began = time.monotonic()
    train(args, rank)
    record("work", duration_s=time.monotonic() - began)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
