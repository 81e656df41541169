"""Gradients that are lost without a word, and the audit that names them within one step:

    torchrun --standalone --nproc-per-node=2 examples/reduction_audit.py [FAULT|all]

Each fault is a line that people write. Without the audit training goes on and no error comes; the replicas drift apart (or, where
every rank is wrong alike, train with another learning rate than they were told). `healthy` shows a sound step, `accumulation` two
micro-batches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dtprobe.errors import DtprobeError
from dtprobe.framework import start
from dtprobe.framework.precision import Report, audit

ALL = ("body.weight", "body.bias", "head.weight", "head.bias")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(torch.tanh(self.body(x)))
        return self.extra(y) if hasattr(self, "extra") else y


@dataclass
class Training:
    """A wrapped model and its backward of one batch."""

    model: nn.Module
    backward: Callable[[torch.Tensor], None]


def loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def wrapped(**options: Any) -> tuple[Net, DistributedDataParallel]:
    net = Net()
    return net, DistributedDataParallel(net, **options)


def usual(model: nn.Module) -> Training:
    return Training(model, lambda x: loss(model(x)).backward())


def healthy() -> Training:
    return usual(wrapped()[1])


def accumulation() -> Training:
    _, ddp = wrapped()

    def backward(x: torch.Tensor) -> None:
        first, last = x.chunk(2)
        with ddp.no_sync():
            loss(ddp(first)).backward()
        loss(ddp(last)).backward()

    return Training(ddp, backward)


def module_called() -> Training:
    _, ddp = wrapped()
    return Training(ddp, lambda x: loss(ddp.module(x)).backward())


def part_called() -> Training:
    """The usual forward, and a second backward through a part of the model that DDP does not see."""
    _, ddp = wrapped()

    def backward(x: torch.Tensor) -> None:
        loss(ddp(x)).backward()
        loss(ddp.module.body(x)).backward()

    return Training(ddp, backward)


def no_sync_left_on() -> Training:
    _, ddp = wrapped()

    def backward(x: torch.Tensor) -> None:
        for part in x.chunk(2):
            with ddp.no_sync():
                loss(ddp(part)).backward()

    return Training(ddp, backward)


def no_sync_around_forward_only() -> Training:
    _, ddp = wrapped()

    def backward(x: torch.Tensor) -> None:
        with ddp.no_sync():
            y = ddp(x)
        loss(y).backward()

    return Training(ddp, backward)


def autograd_grad() -> Training:
    _, ddp = wrapped()

    def backward(x: torch.Tensor) -> None:
        parameters = list(ddp.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss(ddp(x)), parameters), strict=True):
            parameter.grad = gradient

    return Training(ddp, backward)


def replaced_after_wrap() -> Training:
    # the old one gets no gradient any more: in the second step DDP complains of that, unless unused ones are allowed
    net, ddp = wrapped(find_unused_parameters=True)
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    return usual(ddp)


def added_after_wrap() -> Training:
    net, ddp = wrapped()
    torch.manual_seed(4)
    net.extra = nn.Linear(4, 4)
    return usual(ddp)


def unfrozen_after_wrap() -> Training:
    net = Net()
    net.head.requires_grad_(False)
    ddp = DistributedDataParallel(net)
    net.head.requires_grad_(True)
    return usual(ddp)


# DDP looks at the annotations of a hook, and does not know them as text: they have none


def unreduced(state, bucket):
    """As a hook that compresses and then returns the wrong one of its two tensors."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def undivided(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def divided_twice(state, bucket):
    size = dist.get_world_size()
    reduced = dist.all_reduce(bucket.buffer() / size, async_op=True).get_future()
    return reduced.then(lambda future: future.value()[0] / size)


class Stale:
    """Overlaps the reduction with the next step, and so returns the bucket of the last one."""

    def __init__(self) -> None:
        self.last: dict[int, torch.Tensor] = {}

    def reduce(self, state, bucket):
        mean = bucket.buffer().clone().div_(dist.get_world_size())
        dist.all_reduce(mean)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(self.last.get(bucket.index(), torch.zeros_like(mean)))
        self.last[bucket.index()] = mean
        return future


def with_hook(hook: Any) -> Callable[[], Training]:
    def training() -> Training:
        _, ddp = wrapped()
        ddp.register_comm_hook(None, hook().reduce if isinstance(hook, type) else hook)
        return usual(ddp)

    return training


def sharded() -> tuple[Net, Any]:
    net = Net()
    fully_shard(net.head)
    return net, fully_shard(net)


def fsdp2_healthy() -> Training:
    return usual(sharded()[1])


def fsdp2_accumulation() -> Training:
    _, model = sharded()

    def backward(x: torch.Tensor) -> None:
        for number, part in enumerate(x.chunk(2)):
            model.set_requires_gradient_sync(number == 1)
            loss(model(part)).backward()

    return Training(model, backward)


def fsdp2_sync_left_off() -> Training:
    _, model = sharded()
    model.set_requires_gradient_sync(False)
    return usual(model)


def fsdp2_undivided() -> Training:
    net, model = sharded()
    for module in (model, net.head):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor
    return usual(model)


def fsdp2_added_after() -> Training:
    net, model = sharded()
    torch.manual_seed(4)
    net.extra = nn.Linear(4, 4)
    return usual(model)


HEALTHY: dict[str, Callable[[], Training]] = {
    "healthy": healthy,
    "accumulation": accumulation,
    "fsdp2-healthy": fsdp2_healthy,
    "fsdp2-accumulation": fsdp2_accumulation,
}

FAULTS: dict[str, tuple[Callable[[], Training], tuple[str, ...], str]] = {
    "module-called": (module_called, ALL, "unreduced"),
    "part-called": (part_called, ("body.weight", "body.bias"), "unreduced"),
    "no-sync-left-on": (no_sync_left_on, ALL, "unreduced"),
    "no-sync-around-forward-only": (no_sync_around_forward_only, ALL, "unreduced"),
    "autograd-grad": (autograd_grad, ALL, "unreduced"),
    "replaced-after-wrap": (replaced_after_wrap, ("head.weight",), "unreduced"),
    "added-after-wrap": (added_after_wrap, ("extra.weight", "extra.bias"), "unreduced"),
    "unfrozen-after-wrap": (unfrozen_after_wrap, ("head.weight", "head.bias"), "unreduced"),
    "hook-unreduced": (with_hook(unreduced), ALL, "unreduced"),
    "hook-undivided": (with_hook(undivided), ALL, "scaled"),
    "hook-divided-twice": (with_hook(divided_twice), ALL, "scaled"),
    "hook-stale": (with_hook(Stale), ALL, "altered"),
    "fsdp2-sync-left-off": (fsdp2_sync_left_off, ALL, "missing"),
    "fsdp2-undivided": (fsdp2_undivided, ALL, "scaled"),
    "fsdp2-added-after": (fsdp2_added_after, ("extra.weight", "extra.bias"), "unreduced"),
}
"""Name -> how it is made, the parameters that lose their gradient, and how."""


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def audited_step(training: Training) -> Report:
    """One audited step."""
    with audit(training.model) as found:
        training.backward(batch(0, dist.get_rank()))
    return found


def train(training: Training, steps: int = 3) -> dict[str, torch.Tensor]:
    """Train without an audit; the parameters at the end."""
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        training.backward(batch(step, dist.get_rank()))
        optimizer.step()
    return {
        name.removeprefix("module."): (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
        for name, tensor in training.model.named_parameters()
    }


def drift(parameters: dict[str, torch.Tensor]) -> float:
    """The largest difference of a parameter between this rank and the others."""
    worst = 0.0
    for tensor in parameters.values():
        low, high = tensor.clone(), tensor.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        worst = max(worst, (high - low).max().item())
    return worst


def main() -> None:
    made = HEALTHY | {name: fault[0] for name, fault in FAULTS.items()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", nargs="?", default="all", choices=["all", *made])
    chosen = parser.parse_args().fault
    with start(deadline_s=60):
        for name in made if chosen == "all" else [chosen]:
            apart = drift(train(made[name]()))
            found = audited_step(made[name]())
            if dist.get_rank() == 0:
                sys.stdout.write(f"{name}: without audit 3 steps, no error, replicas {apart:.2g} apart\n  {found}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except DtprobeError as error:
        sys.exit(f"{type(error).__name__}: {error}")
