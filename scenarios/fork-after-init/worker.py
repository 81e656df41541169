"""Each rank has a child process that reduces with the other rank's child.

`--mode spared`: the child is forked and reduces nothing. `inherited`: the child is forked after the group was made, and uses it. `own`: the
child is forked before anything was made, and starts a group of the children's own with `dtprobe.framework.bootstrap`.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from dtprobe import attempt, record
from dtprobe.authoring.rendezvous import COME_S, join
from dtprobe.framework.bootstrap import resolve, start

TICK_S = 0.05


def forked(work: Callable[[], None]) -> int:
    """Fork a child that does the work and ends."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def wait(child: int, patience_s: float) -> bool:
    """Whether the child came to its end within so many seconds; one that did not is killed."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return True
        time.sleep(TICK_S)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def reduce_inherited() -> None:
    with attempt("child") as made:
        value = torch.ones(4)
        dist.all_reduce(value)
        made.note(sum=value[0].item())


def reduce_own() -> None:
    """A job of the children's own: another run's name, so other keys and another port."""
    placement = resolve(os.environ)
    run = f"children-{os.environ['MASTER_PORT']}"
    children = replace(placement, run=run, master_port=None, agent_store=False)
    with attempt("child") as made, start(children, deadline_s=COME_S, timeout_s=10):
        value = torch.ones(4)
        dist.all_reduce(value)
        made.note(sum=value[0].item())


def compute() -> None:
    with attempt("child") as made:
        made.note(sum=float(os.environ["WORLD_SIZE"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("spared", "inherited", "own"), default="spared")
    parser.add_argument("--timeout-s", type=float, default=2.0)
    parser.add_argument("--patience-s", type=float, default=6.0)
    args = parser.parse_args()
    began = time.monotonic()
    early = forked(reduce_own) if args.mode == "own" else None
    join(args.timeout_s)
    dist.all_reduce(torch.ones(4))
    if early is not None:
        ended = wait(early, COME_S)
    else:
        ended = wait(forked(reduce_inherited if args.mode == "inherited" else compute), args.patience_s)
    record("child-ended", ended=ended)
    record("work", duration_s=time.monotonic() - began)


if __name__ == "__main__":
    main()
