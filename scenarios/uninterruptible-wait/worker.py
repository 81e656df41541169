"""Rank 0 waits in a collective for a rank that is away, and somebody wants it to stop.

`--mode interrupt`: Ctrl-C a second after it began to wait. The injector sends it at the barrier that a second thread makes on
the group `own`, which has this rank alone as a member. `--mode destroy`: rank 0 destroys its group with the collective
under way. `--cured` uses a group of `dtprobe.framework.groups`, in `interruptible` or ended by `end`.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading
import time
from types import FrameType

import torch
import torch.distributed as dist

from dtprobe import attempt, record
from dtprobe.authoring.rendezvous import join
from dtprobe.framework.groups import Groups, ScopedGroup
from dtprobe.framework.interrupt import interruptible

PRESS_S = 1.0


def served(number: int, frame: FrameType | None) -> None:
    """Python's own handler, with the moment noted."""
    record("served")
    signal.default_int_handler(number, frame)


def interrupted(value: torch.Tensor, group: ScopedGroup | None, own: dist.ProcessGroup, cured: bool) -> None:
    def press() -> None:
        record("pressed")
        dist.barrier(group=own)

    signal.signal(signal.SIGINT, served)
    presser = threading.Timer(PRESS_S, press)
    try:
        with contextlib.ExitStack() as stack, attempt("wait"):
            if cured and group is not None:
                stack.enter_context(interruptible(group))
            presser.start()
            dist.all_reduce(value, group=group)
    except KeyboardInterrupt:
        record("interrupted")
    presser.join()


def destroyed(value: torch.Tensor, group: ScopedGroup | None) -> None:
    """The collective is under way when this rank wants to end, as after an exception elsewhere."""
    work = dist.all_reduce(value, group=group, async_op=True)
    time.sleep(PRESS_S)
    with attempt("wait"):
        if group is not None:
            group.end()
        else:
            dist.destroy_process_group()
    del work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--mode", choices=("interrupt", "destroy"), default="interrupt")
    parser.add_argument("--timeout-s", type=float, default=6.0)
    parser.add_argument("--away-s", type=float, default=0.5, help="rank 1 comes to the collective so much later")
    parser.add_argument("--cured", action="store_true")
    args = parser.parse_args()
    rank = join(args.timeout_s, device=args.device)
    began = time.monotonic()
    value = torch.ones(4, device=args.device)
    own = dist.new_group([rank], use_local_synchronization=True, group_desc="own")
    dist.all_reduce(value)
    with contextlib.ExitStack() as stack:
        group = None
        if args.cured:
            group = stack.enter_context(Groups(timeout_s=args.timeout_s)).create("train")
        if rank == 0 and args.mode == "interrupt":
            interrupted(value, group, own, args.cured)
        elif rank == 0:
            destroyed(value, group)
        else:
            time.sleep(args.away_s)
            with attempt("come"):
                dist.all_reduce(value, group=group)
    record("work", duration_s=time.monotonic() - began)


if __name__ == "__main__":
    main()
