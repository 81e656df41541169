"""A job that starts in order, under any launcher:

    torchrun --standalone --nproc-per-node=2 examples/bootstrap.py
    mpirun -n 2 python examples/bootstrap.py
    srun -n 2 python examples/bootstrap.py

Each rank says where it stands and who is with it, makes a group of its own pair, and leaves nothing behind.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from dtprobe.errors import DtprobeError
from dtprobe.framework import start


def main() -> None:
    with start(deadline_s=60, timeout_s=30) as job:
        where = job.placement
        sys.stdout.write(f"{where}; local rank {where.local_rank} on node {where.node_rank} of {where.nodes}\n")
        ones = torch.ones(1)
        with job.groups.scope("everyone") as everyone:
            dist.all_reduce(ones, group=everyone)
        if where.rank == 0:
            sys.stdout.write("\n".join(str(peer) for peer in job.peers) + f"\nsum of ones: {ones.item():g}\n")


if __name__ == "__main__":
    try:
        main()
    except DtprobeError as error:
        sys.exit(str(error))
