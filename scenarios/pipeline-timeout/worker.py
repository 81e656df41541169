"""Three pipeline stages that pass micro-batches forward and gradients back, one link to the next, by blocking send and recv.

Orders: `paired` receives where the other sends. `crossed` sends first on both sides of the first link, as a schedule does in which each stage passes
on what it has before it takes what comes. `barrier` is `crossed` with a barrier before each micro-batch. With `--late` stage 0 computes longer
than the timeout at micro-batch 2, and a stage that fails ends. `--exchange` passes messages over the framework's pipeline exchange.

By hand, once for each rank: `RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --orders crossed`
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtprobe import attempt
from dtprobe.authoring.rendezvous import COME_S, join

N = 1024
MICROBATCHES = 4
LATE_AT = 2

Move = tuple[str, int, int, str, torch.Tensor]
"""Direction, the other stage, micro-batch, kind, tensor."""


def train(stage: int, pass_on: Callable[[list[Move]], None], order: str, late_s: float) -> int:
    """Run the micro-batches; how many of the received elements are wrong. Forward m carries m + stage, backward m carries -m."""
    wrong = 0

    def message(direction: str, peer: int, m: int, kind: str) -> Move:
        value = -1.0 if direction == "receive" else (m + stage if kind == "forward" else -m)
        return direction, peer, m, kind, torch.full((N,), float(value))

    def move(*moves: Move | None) -> None:
        nonlocal wrong
        own = [one for one in moves if one is not None]
        pass_on(own)
        for direction, peer, m, kind, tensor in own:
            wanted = m + peer if kind == "forward" else -m
            wrong += int((tensor != wanted).sum()) if direction == "receive" else 0

    for m in range(MICROBATCHES + 1):
        if order == "barrier":
            dist.barrier()
        if late_s and stage == 0 and m == LATE_AT:
            time.sleep(late_s)
        new, old = m < MICROBATCHES, m > 0
        if stage == 0:
            move(message("send", 1, m, "forward") if new else None, message("receive", 1, m - 1, "backward") if old else None)
        elif stage == 1:
            take = message("receive", 0, m, "forward") if new else None
            give = message("send", 0, m - 1, "backward") if old else None
            move(*((take, give) if order == "paired" else (give, take)))
            if new:
                move(message("send", 2, m, "forward"), message("receive", 2, m, "backward"))
        elif new:
            move(message("receive", 1, m, "forward"))
            move(message("send", 1, m, "backward"))
    return wrong


def by_calls(group: dist.ProcessGroup) -> Callable[[list[Move]], None]:
    def pass_on(moves: list[Move]) -> None:
        for direction, peer, _, _, tensor in moves:
            (dist.send if direction == "send" else dist.recv)(tensor, peer, group=group)

    return pass_on


def by_exchange(exchange: Any) -> Callable[[list[Move]], None]:
    from dtprobe.framework.pipeline import Transfer

    def pass_on(moves: list[Move]) -> None:
        exchange.wait(exchange.post([Transfer(*move) for move in moves]))

    return pass_on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--orders", default="paired", help="paired, crossed, barrier: one round for each, over groups of their own"
    )
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--exchange", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=2.0)
    args = parser.parse_args()
    stage = join(COME_S)
    if args.exchange:
        from dtprobe.framework.groups import Groups
        from dtprobe.framework.pipeline import Exchange

        groups = Groups()
    for number, order in enumerate(args.orders.split(",")):
        dist.barrier()
        watched: AbstractContextManager[Any] = nullcontext()
        if args.exchange:
            watched = Exchange(groups.create(f"round {number}"), timeout_s=args.timeout_s)
        else:
            group = dist.new_group(timeout=timedelta(seconds=args.timeout_s), group_desc=f"round {number}")
        dist.barrier()
        default_s = c10d.default_pg_timeout.total_seconds()
        with attempt("round", order=order, exchanged=args.exchange, default_s=default_s) as made, watched as exchange:
            try:
                pass_on = by_exchange(exchange) if args.exchange else by_calls(group)
                made.note(wrong=train(stage, pass_on, order, 2 * args.timeout_s if args.late else 0.0))
            except Exception as error:
                made.note(named=",".join(map(str, getattr(error, "ranks", ()))))
                raise
        if made.error and args.late:
            sys.exit(f"stage {stage}: {made.error}: {made.text}")  # as a training program ends
        if not args.late:
            dist.barrier()
    if args.exchange:
        groups.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
