"""What is compared, as a flat list of named entries: modules, optimizers, tensors and nested state with plain values."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtprobe.errors import UsageError
from dtprobe.framework.consistency.digest import short

ALL = "all"
"""Cohort of a tensor of which every rank of the group holds a copy."""


@dataclass(frozen=True)
class Entry:
    """One named thing that this rank holds: a tensor, or the `text` of a plain value (None, number, string)."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    """Of a DTensor the global shape."""
    tensor: torch.Tensor | None = None
    """The part that this rank holds."""
    text: str | None = None
    requires_grad: bool = False
    placement: str = ""
    """Of a DTensor its placements and the shape of its mesh."""
    cohort: str = ALL
    """Which ranks hold the same part: entries are compared between ranks of the same cohort."""
    alone: bool = False
    """No other rank of the group holds this part."""
    offset: tuple[int, ...] | None = None
    """Where this rank's part begins in the global tensor; None where placements do not give one place."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Of the local part; 0 where a dim of at most one element makes a stride mean nothing."""
        if self.tensor is None or self.tensor.numel() == 0:
            return ()
        return tuple(stride if size > 1 else 0 for size, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True))


def entries(state: Any, members: Sequence[int]) -> list[Entry]:
    """Everything in `state`, in its own order; `members` are the global ranks of the group.

    `state` is a tensor, a Module (parameters and buffers, also those that a state dict leaves out), an Optimizer (the state of each
    parameter and the options of each group), an iterator of (name, tensor) pairs, or mappings and sequences of such, with plain
    values (None, bool, int, float, complex, str, bytes, dtype, device) between them. Raises UsageError naming the entry for
    anything else, and for tensors whose bits cannot be read: meta, fake, sparse, nested, quantized, or a Partial DTensor.
    """
    found: dict[str, Entry] = {}
    for name, value in _leaves(state, ""):
        if name in found:
            raise UsageError(f"two entries are named {name!r}", "give each tensor a name of its own")
        found[name] = _entry(name, value, members)
    return list(found.values())


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    pairs = _pairs(value)
    if pairs is None:
        yield name or "value", value
        return
    for key, each in pairs:
        yield from _leaves(each, f"{name}.{key}" if name else str(key))


def _pairs(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """What a container holds, or None for a leaf."""
    if isinstance(value, torch.nn.Module):
        return [*value.named_parameters(), *value.named_buffers()]
    if isinstance(value, torch.optim.Optimizer):
        return _optimizer(value)
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, Iterator):
        pairs = list(value)
        if not all(isinstance(each, tuple) and len(each) == 2 for each in pairs):
            raise UsageError("an iterator must give (name, tensor) pairs", "pass model.named_parameters(), a dict or a list")
        return pairs
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return list(enumerate(value))
    return None


def _optimizer(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    """Its state by place of the parameter, which is the same on every rank, where `id` and state order are not."""
    pairs: list[tuple[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        pairs += [(f"group{number}.{key}", value) for key, value in group.items() if key != "params"]
        for place, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter, {})
            pairs += [(f"group{number}.param{place}.{key}", state[key]) for key in sorted(state)]
    return pairs


def _entry(name: str, value: Any, members: Sequence[int]) -> Entry:
    if isinstance(value, torch.Tensor):
        return _tensor(name, value, members)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device | torch.Size):
        return Entry(name, type(value).__name__, text=repr(value))
    raise UsageError(
        f"{name!r} is a {type(value).__name__}", "pass tensors, modules, optimizers, or state dicts of plain values"
    )


def _tensor(name: str, tensor: torch.Tensor, members: Sequence[int]) -> Entry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    placed = sys.modules.get("torch.distributed.tensor")  # where nobody has imported it there is no DTensor
    if placed is None or not isinstance(tensor, placed.DTensor):
        return Entry(
            name,
            dtype,
            tuple(tensor.shape),
            _readable(name, tensor),
            requires_grad=tensor.requires_grad,
            alone=len(members) == 1,
        )
    if any(placement.is_partial() for placement in tensor.placements):
        raise UsageError(
            f"{name!r} is a DTensor with placements {tensor.placements}: partial sums differ by nature", "redistribute it first"
        )
    with torch.no_grad():
        local = tensor.to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    mesh = tensor.device_mesh
    holders = _holders(mesh, tensor.placements, members)
    return Entry(
        name,
        dtype,
        tuple(tensor.shape),
        _readable(name, local),
        requires_grad=tensor.requires_grad,
        placement=f"{', '.join(map(str, tensor.placements))} on a mesh {tuple(mesh.shape)}",
        cohort=short(json.dumps(holders).encode())[:12],
        alone=len(holders) <= 1,
        offset=_offset(tensor),
    )


def _holders(mesh: Any, placements: Sequence[Any], members: Sequence[int]) -> list[int]:
    """The members that hold the same part as this rank: those that differ from it on replicated mesh axes only."""
    at = mesh.get_coordinate()
    if at is None:
        return []
    ranks = mesh.mesh[tuple(slice(None) if one.is_replicate() else at[axis] for axis, one in enumerate(placements))]
    return sorted(set(ranks.reshape(-1).tolist()) & set(members))


def _offset(tensor: Any) -> tuple[int, ...] | None:
    """Where this rank's part begins: torch.chunk's rule, applied mesh axis by mesh axis (torch.distributed.tensor's Shard)."""
    at = tensor.device_mesh.get_coordinate()
    if at is None or not all(one.is_replicate() or type(one).__name__ == "Shard" for one in tensor.placements):
        return None
    offset, size = [0] * tensor.dim(), list(tensor.shape)
    for axis, one in enumerate(tensor.placements):
        if one.is_replicate():
            continue
        chunk = -(-size[one.dim] // tensor.device_mesh.size(axis))
        begin = min(chunk * at[axis], size[one.dim])
        offset[one.dim] += begin
        size[one.dim] = min(chunk, size[one.dim] - begin)
    return tuple(offset)


def _readable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, where its bits are in memory as dtype and strides say; raises UsageError elsewhere."""
    refused = {
        f"its layout is {tensor.layout}": tensor.layout is not torch.strided or tensor.is_nested,
        "it is on the meta device and has no values": tensor.is_meta,
        "it is quantized": tensor.is_quantized,
        f"it is a {type(tensor).__name__}, whose bits lie elsewhere": type(tensor).__torch_dispatch__
        is not torch.Tensor.__torch_dispatch__,
    }
    for why, applies in refused.items():
        if applies:
            raise UsageError(f"{name!r} cannot be compared: {why}", "pass the strided tensors it is made of")
    return tensor.detach()
