"""An epoch of DDP in which one rank has fewer batches than the others.

With each cure in turn: `none`, `join` trains within torch's `Join`, `agreed` stops all ranks together when the first has no batch left, `checked`
runs the loop under `dtprobe.framework.checked`.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --short-rank 1`
"""

from __future__ import annotations

import argparse
import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from dtprobe import attempt
from dtprobe.authoring.rendezvous import join

START_S = 60.0


def train(model: DistributedDataParallel, batches: int, cure: str, group: dist.ProcessGroup, device: str) -> int:
    """The epoch; how many steps this rank made."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made = 0
    generator = torch.Generator().manual_seed(dist.get_rank())
    with Join([model]) if cure == "join" else contextlib.nullcontext():
        for batch in range(batches + 1):
            if cure == "agreed":
                more = torch.tensor([float(batch < batches)], device=device)
                dist.all_reduce(more, op=dist.ReduceOp.MIN, group=group)
                if not more.item():
                    break
            elif batch == batches:
                break
            optimizer.zero_grad()
            model(torch.randn(8, 16, generator=generator).to(device)).square().mean().backward()
            optimizer.step()
            made += 1
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short-rank", type=int, default=-1, help="this rank has two batches fewer; -1: none")
    parser.add_argument("--cures", default="none", help="none, join, agreed, checked: one epoch with each, in this order")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--trials", type=int, default=2, help="rounds over the cures")
    parser.add_argument("--timeout-s", type=float, default=2.5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    device, rank = args.device, join(START_S, device=args.device)
    batches = args.batches - (2 if rank == args.short_rank else 0)
    for cure in args.cures.split(",") * args.trials:
        group = dist.new_group(timeout=timedelta(seconds=args.timeout_s), group_desc=cure)
        checking = contextlib.ExitStack()
        if cure == "checked":
            from dtprobe.framework.checked import checked

            group = checking.enter_context(checked(group, timeout_s=START_S))
        torch.manual_seed(1)
        model = DistributedDataParallel(torch.nn.Linear(16, 4).to(device), process_group=group)
        dist.barrier()  # the default group keeps the ranks together
        with attempt("epoch", cure=cure, batches=batches) as made:
            try:
                with checking:
                    made.note(steps=train(model, batches, cure, group, device))
            except Exception as error:
                made.note(named=",".join(map(str, getattr(error, "ranks", ()))))
                raise
            finally:
                made.note(weights=float(sum(each.detach().double().sum() for each in model.parameters())))
        dist.barrier()
        del model  # before the group: torch 2.13 can deadlock when the reducer goes last
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
