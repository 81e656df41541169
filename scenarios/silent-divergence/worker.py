"""Data-parallel training whose ranks are equal at each step, unless something changes one of them.

Each rank has data of its own; gradients are averaged by one all-reduce a step, and every rank evaluates the same fixed batch. A
`step` observation says what a team would log (loss and norm of the weights, four decimals) and, for the judge alone, a
cryptographic hash of all weights. `--guard` compares the weights across ranks after each step by `dtprobe.framework.consistency`.

By hand, once for each rank: `RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtprobe import record


def guard(wanted: bool, timeout_s: float) -> Callable[[int, Any], object]:
    """What to call at the end of each step with its number and the weights: nothing, or the check."""
    if not wanted:
        return lambda step, state: None
    from dtprobe.framework.consistency import Every

    return Every(1, timeout_s=timeout_s)


def train(args: argparse.Namespace, rank: int) -> torch.Tensor:
    """The weights after the last step, flat; raises what the check raises, having recorded it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))
    held_out, target = torch.randn(64, 64), torch.randn(64, 8)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if args.device == "cuda" else torch.device("cpu")
    model, held_out, target = model.to(device), held_out.to(device), target.to(device)
    end_of_step = guard(args.guard, args.timeout_s)
    dist.barrier()  # all have imported what they need
    data = torch.Generator().manual_seed(rank + 1)
    for step in range(args.steps):
        batch = torch.randn(16, 64, generator=data).to(device)
        loss = (model(batch) - batch[:, :8].sin()).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        flat = torch.nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - args.learning_rate * flat
        torch.nn.utils.vector_to_parameters(weights, model.parameters())
        with torch.no_grad():
            seen = (model(held_out) - target).square().mean().item()
        digest = hashlib.blake2b(weights.cpu().numpy().tobytes(), digest_size=16).hexdigest()
        record("step", step=step, loss=f"{seen:.4f}", norm=f"{torch.linalg.vector_norm(weights).item():.4f}", digest=digest)
        try:
            end_of_step(step, model)
        except Exception as error:
            named = ",".join(map(str, getattr(error, "ranks", ())))
            record("error", step=step, type=type(error).__name__, text=str(error), named=named)
            raise
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--timeout-s", type=float, default=20)
    parser.add_argument("--guard", action="store_true")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: ranks take turns on the GPUs, still over gloo"
    )
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout_s))
    rank = dist.get_rank()
    weights = train(args, rank)
    first = weights.clone()
    dist.broadcast(first, 0)
    apart = (first.view(torch.int32) != weights.view(torch.int32)).sum().item()
    record("end", elements=weights.numel(), apart=apart, by=(first - weights).abs().max().item())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
