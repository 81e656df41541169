"""Two groups of the same ranks; one rank enters them in the other order, waiting for each before it goes to the next.

Each way is tried in turn: `none` is torch as it is, `detail` the same under TORCH_DISTRIBUTED_DEBUG, `async` issues both before it waits for
either, `checked` runs under `dtprobe.framework.checked`.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --swap-rank 1`
"""

from __future__ import annotations

import argparse
import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist

from dtprobe import attempt
from dtprobe.authoring.rendezvous import join

START_S = 60.0
NAMES = ("data", "tensor")
"""The two groups, as those of a mesh's two axes would be called."""


def enter(groups: dict[str, dist.ProcessGroup], order: list[str], way: str, device: str) -> None:
    """One all-reduce on each group in that order."""
    tensors = {name: torch.ones(4, device=device) for name in order}
    if way == "async":
        works = [dist.all_reduce(tensors[name], group=groups[name], async_op=True) for name in order]
        for work in works:
            work.wait()
        return
    for name in order:
        dist.all_reduce(tensors[name], group=groups[name])
        if device != "cpu":
            torch.cuda.synchronize()  # what makes the order matter there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swap-rank", type=int, default=-1, help="this rank enters the groups in the other order; -1: none")
    parser.add_argument("--ways", default="none", help="none, detail, async, checked: in this order")
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=3.0)
    parser.add_argument("--check-timeout-s", type=float, default=1.0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    device, rank = args.device, join(START_S, device=args.device)
    order = list(NAMES)[::-1] if rank == args.swap_rank else list(NAMES)
    for way in args.ways.split(",") * args.trials:
        dist.set_debug_level(dist.DebugLevel.DETAIL if way == "detail" else dist.DebugLevel.OFF)
        groups = {name: dist.new_group(timeout=timedelta(seconds=args.timeout_s), group_desc=name) for name in NAMES}
        enter(groups, list(NAMES), "none", device)
        checking = contextlib.ExitStack()
        if way == "checked":
            from dtprobe.framework.checked import checked

            groups = {name: checking.enter_context(checked(groups[name], timeout_s=args.check_timeout_s)) for name in NAMES}
        dist.barrier()  # the default group keeps the ranks together; from here on the deadlines measure the calls alone
        with attempt("enter", way=way) as made:
            try:
                with checking:
                    enter(groups, order, way, device)
            except Exception as error:
                made.note(named=",".join(map(str, getattr(error, "ranks", ()))))
                raise
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
