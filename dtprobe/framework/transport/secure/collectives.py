"""The collectives, made of encrypted point-to-point messages. Ranks are group ranks; tensors are contiguous and on the CPU.

Rings for what is large (each rank sends 2(n-1)/n of an all-reduce, as gloo's does), a tree for broadcast, pairs for all-to-all.
The sum of a ring is the same bits on every rank: one rank computes each part, the others copy it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtprobe.framework.transport.secure.errors import NotCovered
from dtprobe.framework.transport.secure.wire import Expected, Sent, Wire

_SEGMENT_BYTES = 4 << 20
_IN_FLIGHT = 2
_DIRECT_BYTES = 32 << 10

_Op: Any = dist.ReduceOp.RedOpType  # its stub has no members
_REDUCTIONS: dict[Any, Callable[[torch.Tensor, torch.Tensor], object]] = {
    _Op.SUM: lambda into, other: into.add_(other),
    _Op.AVG: lambda into, other: into.add_(other),
    _Op.PRODUCT: lambda into, other: into.mul_(other),
    _Op.MIN: lambda into, other: torch.minimum(into, other, out=into),
    _Op.MAX: lambda into, other: torch.maximum(into, other, out=into),
    _Op.BAND: lambda into, other: into.bitwise_and_(other),
    _Op.BOR: lambda into, other: into.bitwise_or_(other),
    _Op.BXOR: lambda into, other: into.bitwise_xor_(other),
}


class Collectives:
    """One collective at a time on `wire`; `name` and `timeout` are those of the collective that is running."""

    def __init__(self, wire: Wire, name: str, timeout: timedelta) -> None:
        self._wire = wire
        self._name = name
        self._timeout = timeout
        self._me = wire.members.me
        self._size = len(wire.members.ranks)

    def barrier(self) -> None:
        """Nobody leaves before all have come: in round k, say so to the rank 2**k further."""
        step = 1
        nothing = torch.empty(0, dtype=torch.uint8)
        while step < self._size:
            self._exchange(nothing, (self._me + step) % self._size, nothing.clone(), (self._me - step) % self._size)
            step *= 2

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """A binomial tree from `root`."""
        place = (self._me - root) % self._size
        step = 1
        while step < self._size:
            if place < step:
                if place + step < self._size:
                    self._exchange(tensor, (self._me + step) % self._size, None, None)
            elif place < 2 * step:
                self._exchange(None, None, tensor, (self._me - step) % self._size)
            step *= 2

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        flat = tensor.view(-1)
        if flat.numel() * flat.element_size() <= _DIRECT_BYTES:
            self._all_reduce_directly(flat, op)
            return
        parts = list(flat.tensor_split(self._size))
        self._ring_reduce(parts, op)
        self._ring_gather(parts)

    def _all_reduce_directly(self, flat: torch.Tensor, op: Any) -> None:
        """One round for what is small: all to all, and each adds up in the order of ranks, so that all get the same bits."""
        others = [torch.empty_like(flat) for _ in range(self._size)]
        others[self._me].copy_(flat)
        self.all_to_all(others, [flat] * self._size)
        flat.copy_(others[0])
        for other in others[1:]:
            _reduce(flat, other, op)
        _average(flat, op, self._size)

    def reduce(self, tensor: torch.Tensor, op: Any, root: int) -> None:
        """Only `root`'s tensor changes."""
        parts = list((tensor.view(-1) if self._me == root else tensor.reshape(-1).clone()).tensor_split(self._size))
        self._ring_reduce(parts, op)
        self.gather(parts if self._me == root else None, parts[self._me], root)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any) -> None:
        parts = [each.reshape(-1).clone() for each in inputs]
        self._ring_reduce(parts, op)
        output.view(-1).copy_(parts[self._me])

    def all_gather(self, outputs: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
        parts = [each.view(-1) for each in outputs]
        if parts[self._me].data_ptr() != mine.data_ptr():
            parts[self._me].copy_(mine.reshape(-1))
        self._ring_gather(parts)

    def gather(self, outputs: Sequence[torch.Tensor] | None, mine: torch.Tensor, root: int) -> None:
        if self._me != root:
            self._exchange(mine, root, None, None)
            return
        assert outputs is not None
        for peer, output in enumerate(outputs):
            if peer != root:
                self._exchange(None, None, output, peer)
            elif output.data_ptr() != mine.data_ptr():
                output.copy_(mine)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        if self._me != root:
            self._exchange(None, None, output, root)
            return
        assert inputs is not None
        for peer, each in enumerate(inputs):
            if peer != root:
                self._exchange(each, peer, None, None)
            else:
                output.copy_(each)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        outputs[self._me].copy_(inputs[self._me])
        for step in range(1, self._size):
            to, source = (self._me + step) % self._size, (self._me - step) % self._size
            self._exchange(inputs[to], to, outputs[source], source)

    def _ring_reduce(self, parts: list[torch.Tensor], op: Any) -> None:
        """Afterwards the part with this rank's number is reduced over all ranks; the others hold what passed through."""
        right, left = (self._me + 1) % self._size, (self._me - 1) % self._size
        for step in range(1, self._size):
            ours, theirs = parts[(self._me - step) % self._size], parts[(self._me - step - 1) % self._size]
            self._exchange(ours, right, theirs, left, lambda into, other: _reduce(into, other, op))
        _average(parts[self._me], op, self._size)

    def _ring_gather(self, parts: list[torch.Tensor]) -> None:
        right, left = (self._me + 1) % self._size, (self._me - 1) % self._size
        for step in range(self._size - 1):
            self._exchange(parts[(self._me - step) % self._size], right, parts[(self._me - step - 1) % self._size], left)

    def _exchange(
        self,
        ours: torch.Tensor | None,
        to: int | None,
        theirs: torch.Tensor | None,
        source: int | None,
        combine: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        """Send `ours` to `to` while `theirs` comes from `source`, in segments of which a few are in flight.

        With `combine` what comes is combined into `theirs` instead of replacing it.
        """
        outgoing, incoming = _segments(ours), _segments(theirs)
        sent: deque[Sent] = deque()
        asked: deque[tuple[Expected, torch.Tensor]] = deque()
        spare: list[torch.Tensor] = []
        for at in range(max(len(outgoing), len(incoming))):
            if at < len(incoming):
                target = incoming[at]
                place = target
                if combine is not None:
                    place = (spare.pop() if spare else torch.empty_like(target))[: target.numel()]
                asked.append((self._wire.expect(place, source, self._name), target))
            if at < len(outgoing):
                assert to is not None
                sent.append(self._wire.send(outgoing[at], to, self._name))
            if len(asked) >= _IN_FLIGHT:
                self._arrived(asked, combine, spare)
            if len(sent) >= _IN_FLIGHT:
                sent.popleft().finish(self._timeout)
        while asked:
            self._arrived(asked, combine, spare)
        while sent:
            sent.popleft().finish(self._timeout)

    def _arrived(
        self,
        asked: deque[tuple[Expected, torch.Tensor]],
        combine: Callable[[torch.Tensor, torch.Tensor], None] | None,
        spare: list[torch.Tensor],
    ) -> None:
        expected, target = asked.popleft()
        self._wire.finish(expected, self._timeout)
        if combine is not None:
            combine(target, expected.tensor)
            spare.append(expected.tensor)


def reduction(op: Any) -> Any:
    """The kind of a reduce operation; raises NotCovered for one with a factor."""
    kind = getattr(op, "op", op)
    if kind not in _REDUCTIONS:
        raise NotCovered(f"reduce operation {kind} is not among those of the encrypted transport", "use SUM and scale")
    return kind


def _reduce(into: torch.Tensor, other: torch.Tensor, op: Any) -> None:
    _REDUCTIONS[op](into, other)


def _average(part: torch.Tensor, op: Any, size: int) -> None:
    if op == _Op.AVG:
        if not (part.is_floating_point() or part.is_complex()):
            raise NotCovered(f"the average of {part.dtype} is not defined", "average floating-point numbers")
        part.div_(size)


def _segments(tensor: torch.Tensor | None) -> list[torch.Tensor]:
    """Pieces of at most 4 MiB; an empty tensor is one piece, so that a message goes all the same."""
    if tensor is None:
        return []
    flat = tensor.view(-1)
    return list(flat.split(max(1, _SEGMENT_BYTES // flat.element_size()))) if flat.numel() else [flat]
