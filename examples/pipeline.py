"""torch.distributed.pipelining with its messages watched, and what happens when one stage goes wrong:

    torchrun --standalone --nproc-per-node=4 examples/pipeline.py [train|skip|stop|shape]

`train` prints the loss of each step; with the others stage 2 skips a message, stops, or sends another shape, and every stage ends with an
error that names it (torchrun then kills the stopped one after 30 s). Without the exchange, `skip` and `stop` hang until a timeout that names no stage, and `shape` aborts.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from dtprobe.errors import DtprobeError
from dtprobe.framework import start
from dtprobe.framework.pipeline import Exchange, exchanged

CULPRIT = 2


def main(mistake: str) -> None:
    with start(deadline_s=60) as job:
        rank, stages = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        block = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
        group = job.groups.create("pipeline")
        assert group is not None
        with Exchange(group, timeout_s=5) as exchange:
            stage = exchanged(PipelineStage(block, rank, stages, torch.device("cpu"), group=exchange.group), exchange)
            if rank == CULPRIT:
                spoil(stage, mistake)
            train(Schedule1F1B(stage, 8, loss_fn=torch.nn.functional.mse_loss), block, first=stage.is_first, last=stage.is_last)


def train(schedule: Schedule1F1B, block: torch.nn.Module, *, first: bool, last: bool) -> None:
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    x, target = torch.randn(32, 16), torch.zeros(32, 16)
    for step in range(5):
        losses: list[torch.Tensor] = []
        if last:
            schedule.step(*([x] if first else []), target=target, losses=losses)
            sys.stdout.write(f"step {step}: loss {torch.stack(losses).mean().item():.4f}\n")
        else:
            schedule.step(*([x] if first else []))
        optimizer.step()
        optimizer.zero_grad()


def spoil(stage: Any, mistake: str) -> None:
    """Make a stage go wrong at its first micro-batch 3."""
    give = stage.get_fwd_send_ops

    def wrong(microbatch: int) -> list[Any]:
        ops = give(microbatch)
        if microbatch != 3:
            return ops
        if mistake == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return [] if mistake == "skip" else ops

    stage.get_fwd_send_ops = wrong
    if mistake == "shape":
        plain = stage.submod.forward
        calls = iter(range(1000))
        stage.submod.forward = lambda x: plain(x) if next(calls) < 4 else plain(x)[:2]


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "train")
    except (DtprobeError, RuntimeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
