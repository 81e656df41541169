"""A collective that one rank calls differently, caught before it runs:

    torchrun --standalone --nproc-per-node=2 examples/checked.py [reduce-op|root|shape|skip]

Without the check, `reduce-op` would compute something else on each rank and say nothing; see what it says here.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from dtprobe.errors import DtprobeError
from dtprobe.framework import start


def main(mistake: str) -> None:
    with start(deadline_s=60, checked_for=100):
        odd = dist.get_rank() == 1
        for step in range(10):
            wrong = odd and step == 6
            gradient = torch.ones(6 if wrong and mistake == "shape" else 4)
            dist.broadcast(gradient, 1 if wrong and mistake == "root" else 0)
            if not (wrong and mistake == "skip"):
                dist.all_reduce(gradient, dist.ReduceOp.PRODUCT if wrong and mistake == "reduce-op" else dist.ReduceOp.SUM)


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "reduce-op")
    except DtprobeError as error:
        sys.exit(f"{type(error).__name__}: {error}")
