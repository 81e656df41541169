"""Training with loss scaling, in which each rank has a part that it shares with the others and one of its own, as with experts.

Gradients of the shared part are averaged, those of the own part are not. In step 2 all ranks overflow, as happens at the start of
training. With `--overflow`, rank 1's own part overflows in step 4. `--consistent` uses `ConsistentScaler` in the stock one's place.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --overflow`
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from dtprobe import attempt
from dtprobe.authoring.rendezvous import join

SCALE = 32.0
COMMON, LONE, CULPRIT = 2, 4, 1


def scaler_for(device: str, consistent: bool) -> torch.amp.GradScaler:
    if not consistent:
        return torch.amp.GradScaler(device, init_scale=SCALE)
    from dtprobe.framework.precision import ConsistentScaler

    return ConsistentScaler(device, init_scale=SCALE, timeout_s=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overflow", action="store_true")
    parser.add_argument("--consistent", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    rank = join(20.0, device=args.device)
    torch.manual_seed(0)
    shared = torch.randn(16, 16, device=args.device, requires_grad=True)
    own = torch.full((16,), float(rank + 1), device=args.device, requires_grad=True)
    optimizer = torch.optim.SGD([shared, own], lr=0.01)
    scaler = scaler_for(args.device, args.consistent)
    dist.barrier()
    for step in range(args.steps):
        factor = 1.0
        if step == COMMON or (args.overflow and rank == CULPRIT and step == LONE):
            factor = float("inf")
        with attempt("step", step=step) as made:
            optimizer.zero_grad()
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank)).to(args.device)
            loss = (x @ shared).square().mean() + (own * own).sum() * factor
            scaler.scale(loss).backward()
            dist.all_reduce(shared.grad)
            shared.grad /= dist.get_world_size()
            scaler.step(optimizer)
            scaler.update()
            made.note(scale=scaler.get_scale())
        # the judge's own look, which the training does not have
        both = [torch.empty_like(shared) for _ in range(dist.get_world_size())]
        dist.all_gather(both, shared.detach())
        scales = [torch.empty(1, device=args.device) for _ in both]
        dist.all_gather(scales, torch.tensor([scaler.get_scale()], device=args.device))
        made_apart = max((each - both[0]).abs().max().item() for each in both)
        with attempt("look", step=step) as look:
            look.note(apart=made_apart, scales=len({one.item() for one in scales}), scale=scaler.get_scale())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
