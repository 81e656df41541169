"""Gradients that are summed over ranks in float32, whatever precision they were computed in.

A sum in bfloat16 rounds to 8 bits at every addition: of 256 and 1 from two ranks FSDP2 makes a mean of 128, not 128.5
(tests/framework/precision/test_reduction.py). The price is twice the bytes on the wire.
"""

# No postponed annotations here: DDP reads those of a hook, and refuses them as text.

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from dtprobe.errors import UsageError

_POLICY = "MixedPrecisionPolicy(..., reduce_dtype=torch.float32)"


def reduce_in_fp32(model: nn.Module) -> None:
    """Make `model` reduce its gradients in float32 (float64 ones stay so); call it on every rank before the first forward.

    DistributedDataParallel gets a communication hook: buckets are widened, averaged and narrowed again. A model under FSDP2's
    `fully_shard` gets `reduce_dtype=torch.float32` in the mixed-precision policy of each of its groups. Raises UsageError for
    anything else, for a DDP model that has a hook already, and for an FSDP2 model that has run.
    """
    if isinstance(model, DistributedDataParallel):
        _ddp(model)
    elif isinstance(model, FullyShardedDataParallel):
        raise UsageError(
            "FSDP1 fixes its precision when it wraps", "pass mixed_precision=MixedPrecision(reduce_dtype=torch.float32)"
        )
    elif any(isinstance(module, FSDPModule) for module in model.modules()):
        _fsdp2(model)
    else:
        raise UsageError(
            f"{type(model).__name__} is wrapped by neither DistributedDataParallel nor fully_shard: nothing here reduces its gradients",
            "pass the wrapped model; tensor-parallel gradients are reduced by DTensor in their own dtype",
        )


def fp32_hook(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for DDP (`register_comm_hook(group, fp32_hook)`): the mean over the ranks, summed in float32."""
    over = group if group is not None else dist.group.WORLD
    assert over is not None
    buffer = bucket.buffer()
    exact = buffer.to(torch.promote_types(buffer.dtype, torch.float32)).div_(over.size())
    reduced = dist.all_reduce(exact, group=over, async_op=True).get_future()
    return reduced.then(lambda future: buffer.copy_(future.value()[0]))


def _ddp(model: DistributedDataParallel) -> None:
    if model._comm_hooks:
        hook = getattr(model._comm_hooks[0][0], "__name__", repr(model._comm_hooks[0][0]))
        raise UsageError(f"this DDP model reduces through {hook} already", "a model has one hook: drop that one, or this call")
    model.register_comm_hook(model.process_group, fp32_hook)


def _fsdp2(model: nn.Module) -> None:
    states: list[Any] = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    if any(state._is_root is not None for state in states):  # set by the first forward, which fixes the dtypes
        raise UsageError("this FSDP2 model has run already", f"call it before the first forward, or fully_shard with {_POLICY}")
    for state in states:
        for group in param_groups(state):
            group.mp_policy = dataclasses.replace(group.mp_policy, reduce_dtype=torch.float32)


def param_groups(state: Any) -> list[Any]:
    """The parameter groups of one FSDP2 module's state; torch has had one a module, and since 2.11 or so a list."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
