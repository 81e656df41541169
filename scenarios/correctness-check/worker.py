"""A check of all-reduce as it is often written, beside what really holds on the ranks.

Each trial all-reduces a seeded tensor. `printed` is what the document's script looks at, the first element on one rank; the ranks' results are
gathered for the judge, who compares all bits. `document` are its other two assumptions: that random tensors are equal on all ranks, and that
all_reduce returns the result. `--check` asks `dtprobe.framework.consistency`.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from dtprobe import attempt
from dtprobe.authoring.rendezvous import join

N = 4096


def brought(rank: int, trial: int) -> torch.Tensor:
    """What a rank brings, from a seed: every rank can say what the others bring."""
    return torch.randn(N, generator=torch.Generator().manual_seed(1000 * trial + rank))


def differing(tensor: torch.Tensor) -> int:
    """Elements whose bits are not the same on all ranks; gathered, so that nothing that is done to an all-reduce touches it."""
    both = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(both, tensor)
    return max(int((one.view(torch.int32) != both[0].view(torch.int32)).sum()) for one in both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    rank = join(30.0, device=args.device)
    beside = dist.new_group(group_desc="beside")  # whose calls an injector that is aimed at the default group leaves alone
    for trial in range(args.trials):
        tensor = brought(rank, trial).to(args.device)
        wanted = sum((brought(one, trial) for one in range(dist.get_world_size())), torch.zeros(N))
        dist.all_reduce(tensor)
        wrong = int(((tensor.cpu() - wanted).abs() > 1e-5).sum())
        with attempt("printed", trial=trial, wrong=wrong, differing=differing(tensor)) as made:
            made.note(passed=abs(tensor[0].item() - wanted[0].item()) < 1e-5)
        if args.check:
            check(tensor, trial)
        random = torch.randn(N, device=args.device)  # as the document has it: nobody seeded it
        apart = differing(random)
        with attempt("document", trial=trial, differing=apart) as made:
            result = dist.all_reduce(random, group=beside)
            made.note(returned=type(result).__name__)
    dist.barrier()
    dist.destroy_process_group()


def check(tensor: torch.Tensor, trial: int) -> None:
    from dtprobe.framework.consistency import require_consistent

    with attempt("check", trial=trial) as made:
        try:
            require_consistent({"reduced": tensor}, timeout_s=60)
        except Exception as error:
            made.note(named=",".join(map(str, getattr(error, "ranks", ()))))
            raise


if __name__ == "__main__":
    main()
