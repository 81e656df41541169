"""Run by mpirun: DDP, DTensor and FSDP2 over MPI against the same over gloo, in one process; what each rank found is said.

mpirun -n 2 python mpi_training.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dtprobe.framework.transport import mpi

STEPS = 3


def net(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    """With a batch norm DDP has buffers to broadcast; in bfloat16 torch has none on the CPU."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 13), nn.ReLU(), norm(13), nn.Linear(13, 6), nn.ReLU(), nn.Linear(6, 2))


def trained(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and losses after a few steps of plain SGD on this rank's own data."""
    losses = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        loss = model(torch.randn(8, 9, generator=generator)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        losses.append(loss.detach())
    found = [each.detach() for each in model.parameters()]
    return losses + [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]


def ddp(mesh: DeviceMesh) -> list[torch.Tensor]:
    return trained(DistributedDataParallel(net(), process_group=mesh.get_group(), bucket_cap_mb=0.001))


def ddp_with_hook(mesh: DeviceMesh) -> list[torch.Tensor]:
    model = DistributedDataParallel(net(), process_group=mesh.get_group(), bucket_cap_mb=0.001)
    model.register_comm_hook(mesh.get_group(), fp16_compress_hook)
    return trained(model)


def fsdp2(mesh: DeviceMesh) -> list[torch.Tensor]:
    model = net()
    for layer in (*model, model):
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return trained(model)


def fsdp2_divided(mesh: DeviceMesh) -> list[torch.Tensor]:
    """bfloat16 parameters, and a divide factor: a PREMUL_SUM, which gloo cannot do, so that it takes the plain mean."""
    model = net(nn.LayerNorm)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    if mesh.get_group().name() == mpi.NAME:
        model.set_gradient_divide_factor(float(mesh.size()))  # type: ignore[operator]
    return trained(model)


def dtensor(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Every pair of placements, uneven shards, and a product of sharded matrices."""
    torch.manual_seed(1)
    one, two = torch.randn(7, 5), torch.randn(5, 11)
    found = []
    for source in (Shard(0), Shard(1), Replicate()):
        for target in (Shard(0), Shard(1), Replicate()):
            moved = distribute_tensor(one, mesh, [source]).redistribute(placements=[target])
            found += [moved.to_local().clone(), moved.full_tensor()]
    columns, rows = distribute_tensor(one, mesh, [Shard(1)]), distribute_tensor(two, mesh, [Shard(0)])
    product = columns @ rows
    assert product.placements == (Partial(),)
    return [*found, product.redistribute(placements=[Shard(0)]).full_tensor(), product.full_tensor()]


PARTS: dict[str, Callable[[DeviceMesh], list[torch.Tensor]]] = {
    part.__name__: part for part in (ddp, ddp_with_hook, fsdp2, fsdp2_divided, dtensor)
}


def mesh_2d() -> list[Any]:
    """Sums over both axes of a mesh, made of sub-groups."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
    found = []
    for name in ("data", "tensor"):
        mine = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(mine, group=mesh[name].get_group())
        found.append([mine.item(), mesh[name].get_group().name()])
    return found


def compared(gloo: dist.ProcessGroup, ours: dist.ProcessGroup) -> dict[str, object]:
    """The largest difference of any tensor, by part."""
    meshes = [DeviceMesh.from_group(group, "cpu", mesh_dim_names=("all",)) for group in (gloo, ours)]
    apart = {}
    for name, part in PARTS.items():
        expected, found = (part(mesh) for mesh in meshes)
        pairs = zip(expected, found, strict=True)
        apart[name] = max((one.float() - other.float()).abs().max().item() for one, other in pairs if one.numel())
    return {"apart": apart, "axes": mesh_2d()}
