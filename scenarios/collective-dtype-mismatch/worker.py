"""Ranks that all-reduce float32, and one that brings int32 of the same size. See `dtprobe.authoring.mismatch.work` for the trials and options.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --differs`
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dtprobe.authoring import mismatch


def bring(rank: int, size: int, differs: bool, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = torch.full((4,), rank + 2, dtype=torch.int32 if differs else torch.float32, device=device)
    return tensor, torch.full((4,), sum(range(2, size + 2)), device=device)


def call(group: dist.ProcessGroup, tensor: torch.Tensor, differs: bool) -> None:
    dist.all_reduce(tensor, group=group)


if __name__ == "__main__":
    mismatch.work(bring, call, __doc__)
