"""Ranks that all-reduce 4 elements, and one that brings 6. See `dtprobe.authoring.mismatch.work` for the trials and options.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --differs`
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dtprobe.authoring import mismatch


def bring(rank: int, size: int, differs: bool, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    elements = 6 if differs else 4
    return torch.full((elements,), rank + 2.0, device=device), torch.full((elements,), sum(range(2, size + 2)), device=device)


def call(group: dist.ProcessGroup, tensor: torch.Tensor, differs: bool) -> None:
    dist.all_reduce(tensor, group=group)


if __name__ == "__main__":
    mismatch.work(bring, call, __doc__)
