"""One flipped bit among ten million parameters of one rank, which neither the loss nor a norm shows:

    torchrun --standalone --nproc-per-node=3 examples/consistency.py [bit|lr|batch]

`bit` flips the lowest bit of one weight after step 5, `lr` changes the learning rate on one rank, `batch` gives two ranks the same
data. The loop checks its state every other step and its data on the first.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from dtprobe.errors import DtprobeError
from dtprobe.framework import start
from dtprobe.framework.consistency import Every, require_distinct


def main(mistake: str) -> None:
    with start(deadline_s=60):
        rank = dist.get_rank()
        odd = rank == dist.get_world_size() - 1
        torch.manual_seed(0)
        model = torch.nn.Linear(10_000, 1_000)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        guard = Every(2)
        torch.manual_seed(0 if odd and mistake == "batch" else rank)
        for step in range(10):
            batch = torch.randn(8, 10_000)
            if step == 0:
                require_distinct(batch, step=step)
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()
            if odd and step == 5 and mistake == "bit":
                model.weight.data.view(torch.int32)[123, 4567] ^= 1
            if odd and step == 5 and mistake == "lr":
                optimizer.param_groups[0]["lr"] = 0.01
            report = guard(step, {"model": model, "optimizer": optimizer})
            if rank == 0 and report:
                norm = torch.linalg.vector_norm(model.weight).item()
                sys.stdout.write(f"step {step}: {report}; the weight's norm is {norm:.6f}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "bit")
    except DtprobeError as error:
        sys.exit(f"{type(error).__name__}: {error}")
