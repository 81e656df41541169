"""Two ranks that pass each other messages, each round over a group of its own.

Modes: `ordered` and `send-first` exchange one tensor each way, the second by sending first on both sides. `kept` and `dropped` pass one from
rank 0 to rank 1 by isend, the second without keeping the handle; the receiver comes after that. `in-order` and `swapped` pass two, the second receiving them in the other order,
without tags. `--exchange` does the same over the framework's pipeline exchange.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --mode send-first`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtprobe import attempt
from dtprobe.authoring.rendezvous import COME_S, join

N = 1024

Pass = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""Sends the first tensors to the other rank and receives the second ones from it."""


def both_ways(rank: int, group: dist.ProcessGroup, *, send_first: bool) -> Pass:
    def passing(out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        steps = [lambda: dist.send(out[0], 1 - rank, group=group), lambda: dist.recv(into[0], 1 - rank, group=group)]
        for step in steps if send_first or rank == 0 else reversed(steps):
            step()

    return passing


def one_way(rank: int, group: dist.ProcessGroup, *, keep: bool, swap: bool, posted: str) -> Pass:
    def passing(out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        store = c10d._get_default_store()
        works = []
        for one in out:
            work = dist.isend(one, 1, group=group)
            if keep:
                works.append(work)
            del work  # where nothing else holds it the message goes with it
        if rank == 0:
            store.set(posted, "")
        store.wait([posted], timedelta(seconds=COME_S))
        works += [dist.irecv(one, 0, group=group) for one in (reversed(into) if swap else into)]
        for work in works:
            work.wait()

    return passing


def exchanged(rank: int, exchange, *, swap: bool) -> Pass:
    from dtprobe.framework.pipeline import Transfer

    def passing(out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        sends = [Transfer("send", 1 - rank, number, "forward", one) for number, one in enumerate(out)]
        receives = [Transfer("receive", 1 - rank, number, "forward", one) for number, one in enumerate(into)]
        exchange.post([*sends, *(reversed(receives) if swap else receives)])  # no handle is kept
        exchange.wait_all()

    return passing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    modes = ("ordered", "send-first", "kept", "dropped", "in-order", "swapped")
    parser.add_argument("--mode", default="ordered", choices=modes)
    parser.add_argument("--exchange", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=2.0)
    args = parser.parse_args()
    rank = join(COME_S)
    swap = args.mode == "swapped"
    if args.exchange:
        from dtprobe.framework.groups import Groups
        from dtprobe.framework.pipeline import Exchange

        groups = Groups()
    sends = args.mode in ("ordered", "send-first") or rank == 0
    receives = args.mode in ("ordered", "send-first") or rank == 1
    count = 2 if args.mode in ("in-order", "swapped") else 1
    for number in range(args.rounds):
        out = [torch.full((N,), 10.0 * rank + each) for each in range(count if sends else 0)]
        into = [torch.full((N,), -1.0) for _ in range(count if receives else 0)]
        dist.barrier()
        exchange = None
        if args.exchange:
            exchange = Exchange(groups.create(f"round {number}"), timeout_s=10 * args.timeout_s)
            passing = exchanged(rank, exchange, swap=swap)
        else:
            group = dist.new_group(timeout=timedelta(seconds=args.timeout_s), group_desc=f"round {number}")
            if args.mode in ("ordered", "send-first"):
                passing = both_ways(rank, group, send_first=args.mode == "send-first")
            else:
                passing = one_way(rank, group, keep=args.mode != "dropped", swap=swap, posted=f"posted/{number}")
        with attempt("round", round=number, exchanged=args.exchange) as made:
            passing(out, into)
            wrong = sum(int((one != 10.0 * (1 - rank) + each).sum()) for each, one in enumerate(into))
            made.note(wrong=wrong, received=len(into))
        dist.barrier()  # nobody leaves while the other is waiting
        if exchange is not None:
            exchange.close()
    if args.exchange:
        groups.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
