"""All ranks train a little, then rank 0 writes a checkpoint while the others wait for it in a barrier.

`--cured`: they wait on a group of `dtprobe.framework.groups` that has a timeout of its own, made for the length of the checkpoint.

By hand, once for each rank: `RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from dtprobe import attempt, record
from dtprobe.authoring.rendezvous import join
from dtprobe.framework.groups import Groups


@contextlib.contextmanager
def waiting_group(cured: bool, timeout_s: float) -> Iterator[dist.ProcessGroup | None]:
    """The group on which the others wait: the default one, or one of its own."""
    if not cured:
        yield None
        return
    with Groups(timeout_s=timeout_s) as groups, groups.scope("checkpoint") as group:
        yield group


def save(seconds: float) -> None:
    """A checkpoint on slow storage: only rank 0 writes it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--timeout-s", type=float, default=4.0)
    parser.add_argument("--save-s", type=float, default=0.5)
    parser.add_argument("--save-timeout-s", type=float, default=30.0)
    parser.add_argument("--cured", action="store_true")
    args = parser.parse_args()
    rank = join(args.timeout_s, device=args.device)
    began = time.monotonic()
    gradient = torch.ones(1024, device=args.device)
    for _ in range(5):
        dist.all_reduce(gradient)
    with attempt("checkpoint") as made, waiting_group(args.cured, args.save_timeout_s) as group:
        if rank == 0:
            save(args.save_s)
        dist.barrier(group=group)
    if made.error:
        raise SystemExit(f"checkpoint: {made.error}: {made.text}")
    dist.all_reduce(gradient)
    record("work", duration_s=time.monotonic() - began)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
