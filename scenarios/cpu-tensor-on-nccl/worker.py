"""All-reduces of CPU tensors over a default group whose backend serves GPUs only.

Without a GPU that backend is a stand-in, called `fake_nccl`: gloo, registered for the device type `cuda` and no other. It shows what
torch does before any backend is asked. With `--device cuda` it is NCCL. `--backends both` gives the CPU a backend of its own.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --backends cuda`
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtprobe import attempt
from dtprobe.authoring.rendezvous import COME_S


def register_fake() -> str:
    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("fake_nccl", make, devices=["cuda"])
    return "fake_nccl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="cpu", choices=("cpu", "cuda", "both"))
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    gpus = "nccl" if args.device == "cuda" else register_fake()
    backend = {"cpu": "gloo", "cuda": gpus, "both": f"cpu:gloo,cuda:{gpus}"}[args.backends]
    dist.init_process_group(backend, timeout=timedelta(seconds=COME_S))
    serves = sorted(str(one) for one in dist.distributed_c10d._get_default_group()._device_types)
    for _ in range(args.trials):
        tensor = torch.ones(4)
        with attempt("all_reduce", backend=backend, serves=",".join(serves)) as made:
            try:
                dist.all_reduce(tensor)
            finally:
                made.note(value=tensor[0].item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
