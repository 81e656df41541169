"""Tensors as MPI sees them: flat memory on the host, of a type that MPI can move or reduce.

bfloat16 and float16 are reduced in float32 and rounded once at the end; bool is reduced as bytes 0 and 1, where a sum is a
logical or; complex numbers are reduced as pairs of reals. Everything else is reduced in its own type. Moving needs no type:
every dtype of torch travels, by the size of its elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from dtprobe.framework.transport.mpi.errors import Unsupported

_COUNT_MAX = 2**31 - 1

_MOVED = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}
_REDUCED = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
_ROUNDED = (torch.float16, torch.bfloat16)
_OPS = {
    "SUM": MPI.SUM,
    "AVG": MPI.SUM,
    "PREMUL_SUM": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
    "BAND": MPI.BAND,
    "BOR": MPI.BOR,
    "BXOR": MPI.BXOR,
}
_BITWISE = ("BAND", "BOR", "BXOR")
_ADDING = ("SUM", "AVG", "PREMUL_SUM")


@dataclass(frozen=True)
class Reduction:
    """How MPI is to reduce a tensor of some dtype, and what is left to do before and after."""

    op: MPI.Op
    wire: torch.dtype
    datatype: MPI.Datatype
    factor: float | torch.Tensor | None
    mean: bool


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """The reduction that torch's `op` means on `dtype`; raises Unsupported where the two do not go together."""
    name = next((name for name in _OPS if op == getattr(dist.ReduceOp, name)), str(op))
    wire = _wire(dtype)
    if name not in _OPS or wire not in _REDUCED:
        raise Unsupported(
            f"{name} of {dtype} cannot be reduced over MPI", f"use one of {', '.join(_OPS)} on a plain number type"
        )
    real = dtype.is_floating_point or dtype.is_complex
    if name in _BITWISE and real:
        raise Unsupported(f"{name} of {dtype}: bits of floating point numbers are not combined", "use an integer type or bool")
    if name in ("AVG", "PREMUL_SUM") and not real:
        raise Unsupported(f"{name} of {dtype}: whole numbers have no exact {name}", "reduce with SUM and divide")
    if dtype.is_complex and name not in _ADDING:
        raise Unsupported(f"{name} of {dtype}: only {', '.join(_ADDING)} are defined on pairs of reals", "use one of those")
    chosen = _OPS[name]
    if dtype == torch.bool:
        chosen = {"SUM": MPI.BOR, "PRODUCT": MPI.BAND}.get(name, chosen)
    # the factor has a public name only since torch 2.13; the pickled state has carried it since the operation exists
    factor = op.__getstate__()[1] if name == "PREMUL_SUM" else None
    return Reduction(chosen, wire, _REDUCED[wire], factor, name == "AVG")


def _wire(dtype: torch.dtype) -> torch.dtype:
    if dtype in _ROUNDED:
        return torch.float32
    if dtype == torch.bool:
        return torch.uint8
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


@dataclass(slots=True)
class Flat:
    """A tensor of the caller's and the flat memory that MPI is given for it: its own where that is possible."""

    tensor: torch.Tensor
    memory: torch.Tensor
    copied: bool

    def deliver(self) -> None:
        """Bring what MPI wrote into the caller's tensor."""
        if self.copied:
            tensor = torch.view_as_real(self.tensor) if self._pairs else self.tensor
            tensor.copy_(self.memory.view(tensor.shape))

    @property
    def _pairs(self) -> bool:
        return self.tensor.is_complex() and not self.memory.is_complex()


def moved(tensor: torch.Tensor, *, read: bool = True) -> Flat:
    """`tensor` to be moved; a tensor that is not plain memory is copied, and with `read` its content with it."""
    return _flat(tensor, tensor.dtype, read)


def reduced(tensor: torch.Tensor, how: Reduction, *, own: bool, read: bool = True) -> Flat:
    """`tensor` to be reduced as `how` says; without `own` (an input) a factor is applied to a copy."""
    flat = _flat(tensor, how.wire, read)
    if read and how.factor is not None:
        flat.memory = flat.memory.mul_(how.factor) if own or flat.copied else flat.memory * how.factor
    return flat


def exchanged(tensor: torch.Tensor, *, read: bool = True) -> Flat:
    """`tensor` as it crosses when ranks add up parts of it: half precision as it is, complex numbers as pairs."""
    return _flat(tensor, tensor.dtype if tensor.dtype in _ROUNDED else _wire(tensor.dtype), read)


def _flat(tensor: torch.Tensor, wire: torch.dtype, read: bool) -> Flat:
    tensor = tensor.detach()
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if tensor.dtype == wire:
        source = tensor
    elif tensor.is_complex():
        source = torch.view_as_real(tensor.resolve_conj())
    elif tensor.dtype == torch.bool and plain:
        source = tensor.view(torch.uint8)
    else:
        source, plain = tensor, False
    if plain:
        return Flat(tensor, source.view(-1), copied=False)
    if not read:
        return Flat(tensor, torch.empty(source.numel(), dtype=wire), copied=True)
    memory = source.to(wire, memory_format=torch.contiguous_format, copy=True).resolve_conj().resolve_neg()
    return Flat(tensor, memory.contiguous().view(-1), copied=True)


def check(what: str, *tensors: torch.Tensor) -> None:
    """Raise Unsupported unless these are dense tensors in host memory, small enough for MPI to count."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise Unsupported(
                f"{what}: a tensor is on {tensor.device}; this transport moves host memory", "use .cpu(), or nccl"
            )
        if tensor.layout != torch.strided:
            raise Unsupported(
                f"{what}: a tensor has the layout {tensor.layout}", "use .to_dense(), or gloo for sparse gradients"
            )
        if tensor.numel() > _COUNT_MAX:
            raise Unsupported(f"{what}: {tensor.numel()} elements are more than MPI counts ({_COUNT_MAX})", "split the tensor")


def same_dtype(what: str, *tensors: torch.Tensor) -> None:
    """Raise Unsupported unless all have one dtype."""
    kinds = sorted({str(tensor.dtype) for tensor in tensors})
    if len(kinds) > 1:
        raise Unsupported(f"{what}: tensors of {' and '.join(kinds)} in one operation", "convert them to one dtype")


def memory(flat: torch.Tensor) -> MPI.buffer:
    """The bytes of a flat tensor; the tensor must outlive it."""
    return MPI.buffer.fromaddress(flat.data_ptr(), flat.numel() * flat.element_size())


def spec(flat: torch.Tensor, datatype: MPI.Datatype | None = None) -> list[Any]:
    """Buffer, count and type as mpi4py takes them."""
    return [memory(flat), flat.numel(), datatype or moving(flat)]


def moving(flat: torch.Tensor) -> MPI.Datatype:
    """A type of the size of this tensor's elements."""
    return _MOVED[flat.element_size()]


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two flat tensors share memory, which MPI forbids between what is sent and what is received."""
    low, low_other = one.data_ptr(), other.data_ptr()
    return low < low_other + other.numel() * other.element_size() and low_other < low + one.numel() * one.element_size()
