"""Collectives on a row of a matrix, which is contiguous, or on a column of one, which is not.

The cells of the matrix outside the view hold -1, and nobody should write them. `--guarded` runs the collectives under
`dtprobe.framework.precision.guarded`, which hands sound copies down.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --strided`
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from dtprobe import attempt
from dtprobe.authoring.rendezvous import join

N = 8
OUTSIDE = -1.0

OPS: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "reduce": lambda tensor: dist.reduce(tensor, 0),
}


def right(op: str, rank: int, size: int) -> torch.Tensor | None:
    """What a rank should have after the operation; None where it is not said (reduce, on others than the root)."""
    sum_ = sum(own(each) for each in range(size))
    return {"all_reduce": sum_, "broadcast": own(0), "reduce": sum_ if rank == 0 else None}[op]


def own(rank: int) -> torch.Tensor:
    return torch.arange(N, dtype=torch.float32) + 10 * rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strided", action="store_true", help="use a column")
    parser.add_argument("--guarded", action="store_true")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    rank = join(20.0, device=args.device)
    guard = contextlib.nullcontext()
    if args.guarded:
        from dtprobe.framework.precision import guarded

        guard = guarded(policy="copy")
    with guard:
        for op, call in OPS.items():
            wanted = right(op, rank, dist.get_world_size())
            for _ in range(args.trials):
                matrix = torch.full((N, 2) if args.strided else (2, N), OUTSIDE, device=args.device)
                view, rest = (matrix[:, 0], matrix[:, 1]) if args.strided else (matrix[0], matrix[1])
                view.copy_(own(rank))
                with attempt(op, strided=not view.is_contiguous()) as made:
                    call(view)
                    off = int((view.cpu() != wanted).sum()) if wanted is not None else 0
                    made.note(wrong=off, outside=int((rest != OUTSIDE).sum()), elements=N)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
