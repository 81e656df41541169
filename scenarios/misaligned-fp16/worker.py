"""All-reduces of half-precision tensors at addresses that are multiples of 32 bytes, or lie so many bytes off one.

`--guarded` runs them under `dtprobe.framework.precision.guarded` with an alignment of 32 bytes, which hands aligned copies down.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --off 1,2,8,16`
"""

from __future__ import annotations

import argparse
import contextlib

import torch
import torch.distributed as dist

from dtprobe import attempt
from dtprobe.authoring.rendezvous import join

ALIGNMENT = 32
N = 1003


def at(off: int, device: str) -> torch.Tensor:
    """A float16 tensor of N elements whose address lies `off` bytes off a multiple of ALIGNMENT; an odd one on the CPU only."""
    room = 2 * N + 2 * ALIGNMENT
    if off % 2:
        memory = bytearray(room)
        start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % ALIGNMENT + off
        return torch.frombuffer(memory, dtype=torch.float16, offset=start, count=N)
    base = torch.zeros(room, dtype=torch.uint8, device=device)
    start = -base.data_ptr() % ALIGNMENT + off
    return base[start : start + 2 * N].view(torch.float16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--off", default="0,0,0,0", help="bytes off a multiple of 32, one all-reduce for each and trial")
    parser.add_argument("--guarded", action="store_true")
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    rank = join(20.0, device=args.device)
    pattern = torch.arange(N).remainder(64).half()  # sums of these are exact in half precision
    wanted = sum((pattern + each for each in range(dist.get_world_size())), torch.zeros(N, dtype=torch.float16))
    guard = contextlib.nullcontext()
    if args.guarded:
        from dtprobe.framework.precision import guarded

        guard = guarded(policy="copy", alignment=ALIGNMENT)
    with guard as group:
        for off in [int(one) for one in args.off.split(",")] * args.trials:
            tensor = at(off, args.device)
            tensor.copy_(pattern + rank)
            with attempt("all_reduce", off=tensor.data_ptr() % ALIGNMENT) as made:
                dist.all_reduce(tensor)
                made.note(wrong=int((tensor.cpu() != wanted).sum()), copies=group.copies.total() if group else 0)
            if group:
                group.copies.clear()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
