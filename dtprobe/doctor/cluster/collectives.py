"""Collectives tried on values whose right result is known exactly, in a form that says whose contribution went wrong.

Element i is contributed by rank i mod n alone, as a small whole number that every dtype holds; the others add zero. So the sum and
the maximum are the same, exact in any dtype and any order, and a wrong element names the rank that it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

_SIZES = (1, 1023, 1 << 16, 1 << 18)
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32)
_MOST_GATHERED = 1 << 20


@dataclass(frozen=True)
class Tried:
    """What one rank saw of one collective: `blamed` are ranks whose contribution arrived wrong, empty where all is right."""

    op: str
    dtype: str
    elements: int
    blamed: tuple[int, ...]


def cases(world_size: int) -> Iterator[tuple[str, torch.dtype, int]]:
    """(operation, dtype, elements) of every trial, the same on every rank. An all-gather's total is bounded."""
    for dtype in _DTYPES:
        yield "all_reduce sum", dtype, 1023
        yield "all_reduce max", dtype, 1023
    for size in _SIZES:
        yield "all_reduce sum", torch.float32, size
        yield "all_gather", torch.float32, max(1, min(size, _MOST_GATHERED // world_size))
    for root in sorted({0, world_size - 1}):
        yield f"broadcast from {root}", torch.float32, 1 << 16


def attempt(
    op: str,
    dtype: torch.dtype,
    elements: int,
    *,
    rank: int,
    world_size: int,
    group: dist.ProcessGroup,
    device: str,
    settle: Callable[[], None],
) -> Tried:
    """Do one collective on `group` and compare its result; raises RuntimeError when it fails.

    `settle` waits for the device before the result is looked at, and gives up when that takes too long.
    """
    name = str(dtype).removeprefix("torch.")
    if op.startswith("all_reduce"):
        owner = torch.arange(elements, device=device) % world_size
        right = (torch.arange(elements, device=device) % 7 + 1).to(dtype)
        x = torch.where(owner == rank, right, torch.zeros_like(right))
        dist.all_reduce(x, op=dist.ReduceOp.SUM if op.endswith("sum") else dist.ReduceOp.MAX, group=group)
        settle()
        return Tried(op, name, elements, _ranks(owner[x != right]))
    if op == "all_gather":
        mine = _pattern(rank, elements, dtype, device)
        found = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(found, mine, group=group)
        settle()
        wrong = [each for each, x in enumerate(found) if not torch.equal(x, _pattern(each, elements, dtype, device))]
        return Tried(op, name, elements, tuple(wrong))
    root = int(op.rpartition(" ")[2])
    x = _pattern(root, elements, dtype, device) if rank == root else torch.full((elements,), -1, dtype=dtype, device=device)
    dist.broadcast(x, root, group=group)
    settle()
    return Tried(op, name, elements, () if torch.equal(x, _pattern(root, elements, dtype, device)) else (root,))


def _pattern(rank: int, elements: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return ((torch.arange(elements, device=device) + rank) % 127).to(dtype)


def _ranks(owners: torch.Tensor) -> tuple[int, ...]:
    return tuple(sorted({int(each) for each in owners.unique()}))
