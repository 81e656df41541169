"""A loop in which a rank logs the average of its loss when that spikes: a branch on local data, with a collective in it.

Each way is run in turn on a group of its own: `none` is torch as it is, `detail` the same under TORCH_DISTRIBUTED_DEBUG, `checked` runs under
`dtprobe.framework.checked`, `agreed` lets all ranks take the branch when one has to.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --spike-rank 1`
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
SPIKE_STEP = 3
LIMIT = 10.0


def loss_of(rank: int, step: int, spikes: bool) -> float:
    return 100.0 if spikes and step == SPIKE_STEP else 1.0 + rank


def spiked(loss: float, group: dist.ProcessGroup, agreed: bool, device: str) -> bool:
    """Whether to average the loss: this rank's own opinion, or that of any rank."""
    if not agreed:
        return loss > LIMIT
    flag = torch.tensor([float(loss > LIMIT)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spike-rank", type=int, default=-1, help="the loss of this rank spikes once; -1: none")
    parser.add_argument("--ways", default="none", help="none, detail, checked, agreed: in this order")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--timeout-s", type=float, default=2.5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    device, rank = args.device, join(START_S, device=args.device)
    size = dist.get_world_size()
    spikes = rank == args.spike_rank
    for way in args.ways.split(","):
        dist.set_debug_level(dist.DebugLevel.DETAIL if way == "detail" else dist.DebugLevel.OFF)
        group = dist.new_group(timeout=timedelta(seconds=args.timeout_s), group_desc=way)
        checking = contextlib.ExitStack()
        if way == "checked":
            from dtprobe.framework.checked import checked

            group = checking.enter_context(checked(group, timeout_s=START_S))
        dist.barrier()  # the default group keeps the ranks together
        with contextlib.suppress(Exception), checking:  # recorded at the step that raised it
            for step in range(args.steps):
                norm = torch.full((1,), float(rank + 1) * (step + 1), device=device)
                with attempt("step", way=way, step=step, right=sum(range(1, size + 1)) * (step + 1.0)) as made:
                    try:
                        dist.all_reduce(norm, group=group)
                        made.note(sum=norm.item())
                        loss = torch.tensor([loss_of(rank, step, spikes)], device=device)
                        if spiked(loss.item(), group, way == "agreed", device):
                            dist.all_reduce(loss, group=group)
                        if way == "checked":
                            group.finish()
                    except Exception as error:
                        made.note(named=",".join(map(str, getattr(error, "ranks", ()))))
                        raise
                if made.error:
                    raise RuntimeError(made.text)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
