"""Make a process group whose back end cannot be made on rank 1, and say what came of it.

On CPU a back end of this program's own, `faulty`, stands for NCCL: it is gloo, but on rank 1 its constructor raises what NCCL's does.
`--cured` makes the group by `dtprobe.framework.bootstrap.start`.

By hand: `torchrun --standalone --nproc-per-node 2 worker.py --backend faulty`
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from dtprobe import attempt, record
from dtprobe.framework.bootstrap import resolve, start

FAULTY = "faulty"
FAILS = 1
TEXT = "NCCL error in: NCCLUtils.cpp, unhandled cuda error (run with NCCL_DEBUG=INFO for details): invalid device pointer"
"""What torch says when ncclCommInitRankConfig returns ncclUnhandledCudaError, with the detail that the document quotes."""


def faulty(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    if rank == FAILS:
        raise dist.DistBackendError(TEXT)
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def use(rank: int, device: str) -> None:
    value = torch.full((4,), float(rank + 1), device=device)
    dist.all_reduce(value)
    record("made", backend=dist.get_backend(), sum=value[0].item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("gloo", "nccl", FAULTY), default="gloo")
    parser.add_argument("--timeout-s", type=float, default=20.0)
    parser.add_argument("--deadline-s", type=float, default=20.0)
    parser.add_argument("--cured", action="store_true")
    args = parser.parse_args()
    dist.Backend.register_backend(FAULTY, faulty, devices=["cpu"])
    rank, began = int(os.environ["RANK"]), time.monotonic()
    device = "cuda" if args.backend == "nccl" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with attempt("init") as made:
        if args.cured:
            with start(resolve(os.environ), backend=args.backend, deadline_s=args.deadline_s, timeout_s=args.timeout_s):
                use(rank, device)
        else:
            dist.init_process_group(args.backend, timeout=timedelta(seconds=args.timeout_s))
            use(rank, device)
            dist.destroy_process_group()
    if made.error:
        raise SystemExit(f"{made.error}: {made.text}")
    record("work", duration_s=time.monotonic() - began)


if __name__ == "__main__":
    main()
