"""A DDP training step whose gradients travel over MPI:

    mpirun -n 2 python examples/mpi_transport.py

Open MPI ends the whole job when a rank dies. With `mpirun --with-ft ulfm` the others get an error that names it:

    mpirun --with-ft ulfm -n 3 python examples/mpi_transport.py --kill 1
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtprobe.errors import DtprobeError
from dtprobe.framework.transport import mpi


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--kill", type=int, metavar="RANK", help="this rank kills itself after the second step")
    options = parser.parse_args()
    where = mpi.register()
    dist.init_process_group(mpi.NAME, timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for step in range(options.steps):
        if step == 2 and dist.get_rank() == options.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.randn(16, 8)
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            sys.stdout.write(f"step {step}: mean loss {mean.item():.4f} ({where.source}, {dist.get_world_size()} ranks)\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (DtprobeError, RuntimeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
