"""One decision of the gradient scaler for the whole job, however the model is spread over the ranks:

    torchrun --standalone --nproc-per-node=2 examples/precision.py [ddp|fsdp2|tp|pp] [--plain] [--steps 200]
    torchrun --standalone --nproc-per-node=4 examples/precision.py pp+dp

A gradient overflows now and then on one rank, in one micro-batch. Every rank says which steps it skipped, its scale, and how far
its parameters are from those of a single process that skipped the same steps. `--plain` takes torch's own scaler instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.framework import start
from dtprobe.framework.precision import ConsistentScaler

WIDTH, BATCH, MICRO_BATCHES = 8, 16, 4
SETTINGS = {"init_scale": 2.0**10, "growth_interval": 3}


@dataclass(frozen=True)
class Overflow:
    """A gradient of `value` in one step: `where` is "backward" (of the block in `micro_batch`) or "gradient" (what backward left)."""

    rank: int
    where: str = "gradient"
    micro_batch: int = 0
    value: float = float("inf")


class Infected(torch.autograd.Function):
    """The identity, whose backward is `value` times the gradient."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        context.value = value
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * context.value, None


class Block(nn.Module):
    """A residual block; `values` holds what the gradient is multiplied by in each forward to come (1.0 when it is empty)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.values: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return Infected.apply(x, self.values.pop(0) if self.values else 1.0)


def whole_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(Block() for _ in range(4)))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=source), torch.randn(BATCH, WIDTH, generator=source)


def share(rank: int, ranks: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.chunk(ranks)[rank] for tensor in tensors]


@dataclass
class Spread:
    """A model spread over ranks: what this rank holds (`names` maps it to the whole model's), and how it runs one backward."""

    module: nn.Module
    backward: Callable[[torch.Tensor, torch.Tensor], None]
    names: Callable[[str], str] = lambda name: name


def accumulate(x: torch.Tensor, y: torch.Tensor, model: Callable[[torch.Tensor], torch.Tensor], scaler: Any) -> None:
    for inputs, targets in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
        scaler.scale(nn.functional.mse_loss(model(inputs), targets) / MICRO_BATCHES).backward()


def alone(rank: int, ranks: int, scaler: Any) -> Spread:
    model = whole_model()
    return Spread(model, lambda x, y: accumulate(x, y, model, scaler))


def ddp(rank: int, ranks: int, scaler: Any) -> Spread:
    model = DistributedDataParallel(whole_model())
    return Spread(model.module, lambda x, y: accumulate(*share(rank, ranks, x, y), model, scaler))


def fsdp2(rank: int, ranks: int, scaler: Any) -> Spread:
    model = whole_model()
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Spread(model, lambda x, y: accumulate(*share(rank, ranks, x, y), model, scaler))


def tp(rank: int, ranks: int, scaler: Any) -> Spread:
    model = whole_model()
    plan = {f"{block}.{layer}": style for block in range(4) for layer, style in _STYLES.items()}
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    return Spread(model, lambda x, y: accumulate(x, y, model, scaler))


_STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def pp(rank: int, ranks: int, scaler: Any) -> Spread:
    return pipeline(rank, ranks, scaler, replicas=1)


def pp_dp(rank: int, ranks: int, scaler: Any) -> Spread:
    return pipeline(rank, ranks, scaler, replicas=2)


def pipeline(rank: int, ranks: int, scaler: Any, *, replicas: int) -> Spread:
    stages = ranks // replicas
    mesh = init_device_mesh("cpu", (replicas, stages), mesh_dim_names=("data", "pipeline"))
    replica, number = mesh.get_local_rank("data"), mesh.get_local_rank("pipeline")
    blocks = whole_model()
    held = len(blocks) // stages
    module = nn.Sequential(*blocks[number * held : (number + 1) * held])
    wrapped = DistributedDataParallel(module, process_group=mesh.get_group("data")) if replicas > 1 else module
    # shapes are given: finding them out runs a backward, after which torch 2.13's DDP fails an assertion of its own
    sample = torch.empty(BATCH // replicas // MICRO_BATCHES, WIDTH, requires_grad=number > 0)
    stage = PipelineStage(
        wrapped,
        number,
        stages,
        torch.device("cpu"),
        input_args=(sample,),
        output_args=(sample.clone().requires_grad_(),),
        group=mesh.get_group("pipeline"),
    )

    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda out, y: scaler.scale(nn.functional.mse_loss(out, y)))

    def backward(x: torch.Tensor, y: torch.Tensor) -> None:
        mine, targets = share(replica, replicas, x, y)
        schedule.step(*([mine] if number == 0 else []), **({"target": targets} if number == stages - 1 else {}))

    def name(held_name: str) -> str:
        block, _, rest = held_name.partition(".")
        return f"{int(block) + number * held}.{rest}"

    return Spread(module, backward, name)


LAYOUTS: Mapping[str, Callable[[int, int, Any], Spread]] = {"ddp": ddp, "fsdp2": fsdp2, "tp": tp, "pp": pp, "pp+dp": pp_dp}


@dataclass(frozen=True)
class Trained:
    skipped: list[int]
    scale: float
    parameters: dict[str, torch.Tensor]


def train(spread: Spread, scaler: Any, overflows: Mapping[int, Overflow], steps: int, rank: int) -> Trained:
    """Train for `steps`; `overflows` maps a step to what goes wrong in it, on one rank."""
    optimizer = torch.optim.SGD(spread.module.parameters(), lr=0.05, momentum=0.9)
    done: list[int] = []
    optimizer.register_step_post_hook(lambda *_: done.append(step))
    block = next(each for each in spread.module.modules() if isinstance(each, Block))
    for step in range(steps):
        wrong = overflows.get(step)
        mine = wrong is not None and wrong.rank == rank
        block.values = (
            [1.0] * wrong.micro_batch + [wrong.value] if wrong is not None and mine and wrong.where == "backward" else []
        )
        optimizer.zero_grad()
        spread.backward(*batch(step))
        block.values = []
        if wrong is not None and mine and wrong.where == "gradient":
            local(next(spread.module.parameters()).grad).view(-1)[:1] = wrong.value
        scaler.step(optimizer)
        scaler.update()
    parameters = {spread.names(name): whole(tensor) for name, tensor in spread.module.named_parameters()}
    return Trained([step for step in range(steps) if step not in done], scaler.get_scale(), parameters)


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()
    return tensor.detach().clone()


def reference(overflows: Iterable[int], steps: int) -> Trained:
    """The same training in this process alone, with torch's own scaler; whatever overflows, overflows here."""
    scaler = plain_scaler()
    return train(alone(0, 1, scaler), scaler, {step: Overflow(0) for step in overflows}, steps, 0)


def plain_scaler() -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    scaler.scale(torch.zeros(1))  # it refuses to unscale on a rank that has never scaled, such as a stage without a loss
    return scaler


def distance(one: Trained, other: Trained) -> float:
    """The largest absolute difference of a parameter of `one` from the same parameter of `other`."""
    return max((tensor - other.parameters[name]).abs().max().item() for name, tensor in one.parameters.items())


def every_overflow(ranks: int) -> list[Overflow]:
    """One of each kind: each rank, each place, each micro-batch, infinity and not a number."""
    values = (float("inf"), float("nan"))
    return [Overflow(rank, "gradient", 0, value) for rank in range(ranks) for value in values] + [
        Overflow(rank, "backward", number, value)
        for rank in range(ranks)
        for number in range(MICRO_BATCHES)
        for value in values
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layout", nargs="?", default="ddp", choices=LAYOUTS)
    parser.add_argument("--plain", action="store_true", help="torch's own scaler")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    with start(deadline_s=60):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if ranks not in ((4,) if options.layout == "pp+dp" else (2, 4)):
            raise UsageError(
                f"{options.layout} on {ranks} ranks",
                "the batch and the four blocks divide by 4, or by 2 where there are no replicas",
            )
        kinds = every_overflow(ranks)
        overflows = {step: kinds[number % len(kinds)] for number, step in enumerate(range(3, options.steps, 4))}
        expected = reference(overflows, options.steps)
        scaler = plain_scaler() if options.plain else ConsistentScaler("cpu", **SETTINGS, timeout_s=60)
        found = train(LAYOUTS[options.layout](rank, ranks, scaler), scaler, overflows, options.steps, rank)
        sys.stdout.write(
            f"rank {rank}: skipped {len(found.skipped)} of {options.steps} steps "
            f"({'the same as' if found.skipped == expected.skipped else 'others than'} a single process), scale {found.scale:g}, "
            f"parameters at most {distance(found, expected):.2g} from a single process\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except DtprobeError as error:
        sys.exit(f"{type(error).__name__}: {error}")
