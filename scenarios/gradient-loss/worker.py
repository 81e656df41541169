"""One step of data-parallel training in each of several ways, right or with a mistake in it that loses gradients.

Every rank computes what all ranks' gradients are and compares the mean of them with what it was left with. A communication hook writes down each
bucket that reaches DDP's reducer, and gradcheck is asked whether the model's own gradients are right. `--audit` makes the step under the framework's
reduction audit. `--sharded` wraps parameters that are sharded already, as the document tells.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --wrong`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from dtprobe import attempt, record
from dtprobe.authoring.rendezvous import join

Backward = Callable[[torch.Tensor], None]
Made = tuple[DDP, Backward]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(4, 6).double(), nn.Linear(6, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(torch.tanh(self.body(x)))
        return self.extra(y) if hasattr(self, "extra") else y


def loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def batch(rank: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)).double()


# Each makes the wrapped model and its backward of a batch; `wrong` puts the mistake in. A hook has no annotations, DDP looks at them.


def usual(model: DDP) -> Made:
    return model, lambda x: loss(model(x)).backward()


def module_called(wrong: bool) -> Made:
    model = DDP(Net())
    return model, lambda x: loss(model.module(x) if wrong else model(x)).backward()


def no_sync_left_on(wrong: bool) -> Made:
    model = DDP(Net())

    def backward(x: torch.Tensor) -> None:
        first, last = x.chunk(2)
        with model.no_sync():
            (loss(model(first)) / 2).backward()
        with model.no_sync() if wrong else nullcontext():
            (loss(model(last)) / 2).backward()

    return model, backward


def autograd_grad(wrong: bool) -> Made:
    model = DDP(Net())

    def backward(x: torch.Tensor) -> None:
        if not wrong:
            loss(model(x)).backward()
            return
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss(model(x)), parameters), strict=True):
            parameter.grad = gradient

    return model, backward


def replaced_after_wrap(wrong: bool) -> Made:
    net = Net()
    model = DDP(net, find_unused_parameters=True)
    if wrong:
        net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    return usual(model)


def added_after_wrap(wrong: bool) -> Made:
    net = Net()
    extra = nn.Linear(4, 4).double()
    if not wrong:
        net.extra = extra
    model = DDP(net)
    net.extra = extra
    return usual(model)


def unfrozen_after_wrap(wrong: bool) -> Made:
    net = Net()
    net.head.requires_grad_(not wrong)
    model = DDP(net)
    net.head.requires_grad_(True)
    return usual(model)


def hook_unreduced(wrong: bool) -> Made:
    return usual(DDP(Net()))


hook_undivided = hook_unreduced

WAYS: dict[str, Callable[[bool], Made]] = {
    way.__name__: way
    for way in (module_called, no_sync_left_on, autograd_grad, replaced_after_wrap, added_after_wrap, unfrozen_after_wrap)
} | {"hook_unreduced": hook_unreduced, "hook_undivided": hook_undivided}


def traced(model: DDP, way: str, wrong: bool) -> None:
    """Reduce by a hook that writes each bucket down, and that is wrong itself where the way says so."""
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    size = dist.get_world_size()

    def hook(state, bucket):
        parameters = ",".join(names.get(id(one), "unknown") for one in bucket.parameters())
        record("bucket", way=way, index=bucket.index(), elements=bucket.buffer().numel(), parameters=parameters)
        if wrong and way == "hook_unreduced":
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        divisor = 1 if wrong and way == "hook_undivided" else size
        reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return reduced.then(lambda done: done.value()[0] / divisor)

    model.register_comm_hook(None, hook)


def step(way: str, wrong: bool, audited: bool, rank: int) -> None:
    torch.manual_seed(4)
    model, backward = WAYS[way](wrong)
    traced(model, way, wrong)
    with attempt("step", way=way, wrong=wrong) as made, ExitStack() as stack:
        report: Any = None
        if audited:
            from dtprobe.framework.precision import audit

            with audit(model, timeout_s=60) as report:
                backward(batch(rank))
        else:
            backward(batch(rank))
        stack.callback(made.note, **measured(model.module, rank))
        if report is not None:
            report.check()


def measured(net: nn.Module, rank: int) -> dict[str, float | bool | str]:
    """How far this rank's gradients are from the mean of all ranks', and from rank 0's; whether gradcheck finds the model right."""
    parameters = dict(net.named_parameters())
    alone = [torch.autograd.grad(loss(net(batch(one))), list(parameters.values())) for one in range(dist.get_world_size())]
    off, lost = 0.0, []
    for name, parameter, *each in zip(parameters, parameters.values(), *alone, strict=True):
        mean = torch.stack(each).mean(0)
        error = ((parameter.grad - mean).norm() / mean.norm()).item()
        off = max(off, error)
        lost += [name] if error > 1e-6 else []
    mine = torch.cat([parameter.grad.flatten() for parameter in parameters.values()])
    both = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(both, mine)
    values = tuple(value.detach().requires_grad_() for value in parameters.values())

    def of_parameters(*given: torch.Tensor) -> torch.Tensor:
        return loss(torch.func.functional_call(net, dict(zip(parameters, given, strict=True)), (batch(rank),)))

    passes = torch.autograd.gradcheck(of_parameters, values, raise_exception=False)
    return {"off": off, "apart": (both[0] - both[1]).abs().max().item(), "lost": ",".join(lost), "gradcheck": passes}


def one_dtensor(net: Net, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    net.head.weight = nn.Parameter(distribute_tensor(net.head.weight.detach(), mesh, [Shard(0)]))


def all_dtensors(net: Net, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    for module in (net.body, net.head):
        for name, parameter in list(module.named_parameters()):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))


def sharded_tensor(net: Net, mesh: DeviceMesh) -> None:
    from torch.distributed._shard import shard_parameter
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    shard_parameter(net.head, "weight", ChunkShardingSpec(0, [f"rank:{one}/cpu" for one in range(dist.get_world_size())]))


SHARDED = {way.__name__: way for way in (one_dtensor, all_dtensors, sharded_tensor)}


def sharded(how: str, kind: str) -> None:
    """What the document tells of: sharded parameters under DDP; or, as they are meant to be used, under fully_shard."""
    from torch.distributed.fsdp import fully_shard

    net = Net()
    if how == "ddp":
        SHARDED[kind](net, init_device_mesh("cpu", (dist.get_world_size(),)))
    with attempt("wrap", how=how, of=kind) as made:
        model: nn.Module = fully_shard(net) if how == "fully_shard" else DDP(net)
    if made.error:
        return
    with attempt("sharded step", how=how, of=kind) as made:
        if how != "fully_shard":
            loss(model(batch(dist.get_rank()))).backward()
            return
        from dtprobe.framework.precision import audit

        with audit(model, timeout_s=60) as report:
            loss(model(batch(dist.get_rank()))).backward()
        report.check()
        made.note(checked=report.checked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--audit", action="store_true")
    parser.add_argument("--sharded", choices=("plain", "ddp", "fully_shard"), help="wrap only, by this")
    parser.add_argument("--trials", type=int, default=2, help="of --sharded, for each kind of sharded parameter")
    args = parser.parse_args()
    rank = join(60.0)
    if args.sharded:
        for kind in [*SHARDED] * args.trials:
            dist.barrier()
            sharded(args.sharded, kind)
    else:
        for way in WAYS:
            dist.barrier()
            step(way, args.wrong, args.audit, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
