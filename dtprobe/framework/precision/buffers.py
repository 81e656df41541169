"""A guard for the tensors that collectives read and write: contiguous, and at addresses that are multiples of 16 bytes.

What torch 2.13 does with a column of a matrix on gloo (measured by `python benchmarks/precision.py`): all_reduce, broadcast,
reduce and the inputs of scatter are silently wrong, and the first three overwrite cells outside the view; all_gather,
all_gather_single, reduce_scatter_single and gather are right; send, recv and all_to_all_single refuse. A permuted but dense
tensor (channels_last, a transpose) is right where every rank has the same layout and silently wrong where one has not.
Addresses: gloo is right at any; NCCL is right too, but slower below 16 bytes (all_reduce by 26 %, all_gather by 52 % at 1 GB on
H200), and symmetric memory refuses below 4.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtprobe.errors import UsageError
from dtprobe.framework.checked import NAMES, call_site
from dtprobe.framework.errors import FrameworkError
from dtprobe.framework.forwarding import COLLECTIVES, ForwardedWork, ForwardingGroup, stand_in

ALIGNMENT = 16
"""Bytes. A vector load of a GPU, and what NCCL's fast kernels want."""

_POINT_TO_POINT = ("send", "recv", "recv_anysource")


class UnsoundBuffer(FrameworkError):
    """A tensor handed to a collective is not contiguous, not aligned, or overlaps itself; raised before anything was sent.

    Only on the ranks whose tensor it is: where the others' are sound, they wait for this rank until their own timeout.
    """


class CopiedWork(ForwardedWork):
    """A collective that ran on copies: once it is waited for, what it wrote is where the caller expects it."""

    def __init__(
        self, inner: ForwardedWork, description: str, written: list[Any], back: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        super().__init__(inner, description)
        self._written = written
        self._back = back

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = super().wait(timeout)
        self._return()
        return done

    def get_future(self) -> torch.futures.Future:
        """The back end's future, then the copy back; its value is the tensors that the caller passed."""

        def returned(future: torch.futures.Future) -> list[Any]:
            future.value()
            self._return()
            return self._written

        return super().get_future().then(returned)

    def result(self) -> list[torch.Tensor]:
        self._return()
        return super().result()

    def _return(self) -> None:
        back, self._back = self._back, []
        for original, copy in back:
            original.copy_(copy)


class GuardedGroup(ForwardingGroup):
    """A group that looks at each tensor before a collective: "raise" refuses an unsound one, "copy" works on a sound copy.

    `copies` counts them by name: `all_reduce at train.py:33 step: float32 [8] with strides (2,) is not contiguous`.
    """

    def __init__(self, inner: dist.ProcessGroup, *, policy: Literal["raise", "copy"], alignment: int = ALIGNMENT) -> None:
        super().__init__(inner)
        if policy not in ("raise", "copy"):
            raise UsageError(f"policy {policy!r}", "choose raise or copy")
        if alignment < 1 or alignment & (alignment - 1):
            raise UsageError(f"an alignment of {alignment} bytes", "choose a power of two; 1 accepts every address")
        self._copying = policy == "copy"
        self._alignment = alignment
        self.copies: Counter[str] = Counter()
        self.copied_bytes = 0

    def guard(self, op: str, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[tuple[torch.Tensor, torch.Tensor]]]:
        """`args` with sound tensors, and (original, copy) of those that `op` writes: its first argument, unless it sends."""
        back: list[tuple[torch.Tensor, torch.Tensor]] = []
        sound = []
        for number, arg in enumerate(args):
            sound.append(self._sound(op, arg, back if number == 0 and op != "send" else None))
        return tuple(sound), back

    def _sound(self, op: str, value: Any, back: list[tuple[torch.Tensor, torch.Tensor]] | None) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._sound(op, each, back) for each in value)
        if not isinstance(value, torch.Tensor) or not (why := unsound(value, self._alignment)):
            return value
        shape = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} with strides {value.stride()}"
        name = f"{NAMES.get(op, op)} at {call_site()}: {shape} {why}"
        if not self._copying or (back is not None and overlaps(value)):
            raise UnsoundBuffer(name, "pass a contiguous tensor and copy the result back, or guard with policy='copy'")
        copy = torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value)
        self.copies[name] += 1
        self.copied_bytes += copy.numel() * copy.itemsize
        if back is not None:
            back.append((value, copy))
        return copy


def unsound(tensor: torch.Tensor, alignment: int = ALIGNMENT) -> str:
    """What is wrong with a tensor as the buffer of a collective ("is not contiguous", "lies 2 bytes off ..."), or ""."""
    if tensor.is_sparse or not tensor.numel():
        return ""
    if not tensor.is_contiguous():
        return "is not contiguous" if not overlaps(tensor) else "overlaps itself"
    off = tensor.data_ptr() % alignment
    return f"lies {off} bytes off a multiple of {alignment}" if off else ""


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements share memory, as those of an expanded tensor do: there is no copying back into it."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@contextlib.contextmanager
def guarded(
    group: dist.ProcessGroup | None = None, *, policy: Literal["raise", "copy"] = "raise", alignment: int = ALIGNMENT
) -> Iterator[GuardedGroup]:
    """Guard the buffers of every collective on `group` (default: the default group) within the `with` block.

    Inside the block the group is replaced everywhere torch looks it up; use the yielded group where you hold a handle. Not
    covered: what DDP, FSDP2 or a mesh captured before. `alignment` in bytes, a power of two. Raises UnsoundBuffer.
    """
    inner = group if group is not None else c10d._get_default_group()
    outer = GuardedGroup(inner, policy=policy, alignment=alignment)
    stand_in(outer, inner)
    try:
        yield outer
    finally:
        if outer in c10d._world.pg_map:
            stand_in(inner, outer)
        outer.let_go()


def _guarded(name: str) -> Any:
    def method(self: GuardedGroup, *args: Any, **kwargs: Any) -> ForwardedWork:
        sound, back = self.guard(name, args)
        work = getattr(ForwardingGroup, name)(self, *sound, **kwargs)
        written = [args[0]] if isinstance(args[0], torch.Tensor) else list(args[0])
        return CopiedWork(work, f"{name} on copies", written, back) if back else work

    method.__name__ = name
    return method


for _name in (*COLLECTIVES, *_POINT_TO_POINT):
    if hasattr(dist.ProcessGroup, _name):
        setattr(GuardedGroup, _name, _guarded(_name))
