"""Every operation over MPI against the same one over gloo, in one process: see mpi_run.py.

What is bit-equal and what only close: see `exact`. Inputs are seeded by rank and case, so any case can be run again alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

REDUCED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
)
MOVED = (*REDUCED, torch.complex64, torch.complex128)
WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced")
MOVES = ("broadcast", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "uneven_all_to_all", "gather",
         "scatter", "send_recv", "recv_any", "all_gather_coalesced")  # fmt: skip
# the last of each is large enough to be summed by exchange, in every dtype on four ranks, in unequal parts
QUICK_SIZES, FULL_SIZES = (0, 1, 5, 66_001), (0, 1, 2, 5, 64, 1000, 4097, 66_001)


@dataclass(frozen=True)
class Case:
    operation: str
    dtype: torch.dtype
    size: int
    reduce_op: str = "SUM"
    wait: bool = True
    layout: str = "plain"


def cases(kind: str) -> Iterator[Case]:
    """`full` is the cross product; `quick` takes every 23rd of it, so each operation, dtype, size and mode still occurs."""
    sizes = FULL_SIZES if kind == "full" else QUICK_SIZES
    found = []
    for layout, wait in itertools.product(("plain", "transposed", "scalar"), (True, False)):
        for dtype, size in itertools.product(MOVED, sizes if layout == "plain" else (6,)):
            found += [Case(name, dtype, size, "SUM", wait, layout) for name in MOVES]
            found += [Case(name, dtype, size, op, wait, layout) for name in REDUCTIONS for op in OPS if sensible(op, dtype)]
    yield from found if kind == "full" else found[::23]


def sensible(op: str, dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return op in ("SUM", "AVG")
    return op != "AVG" if dtype in WHOLE else not op.startswith("B")


def exact(case: Case, world_size: int) -> bool:
    """With two ranks a sum or product of two numbers is rounded once, whoever computes it: bit-equal. With more, the order of
    additions differs, except where no rounding happens: whole numbers, minima and maxima, and whatever only moves."""
    rounds = case.operation in REDUCTIONS and case.reduce_op in ("SUM", "AVG", "PRODUCT") and case.dtype not in WHOLE
    return not rounds or world_size == 2


def tensor(case: Case, rank: int, number: int, size: int | None = None) -> torch.Tensor:
    """What `rank` brings; small values, so that products of all ranks stay finite in every dtype."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    count = case.size if size is None else size
    made = torch.randint(-3, 4, (count,), generator=generator).to(torch.float64)
    if case.dtype == torch.bool:
        return shaped(case, made > 0)
    if case.dtype.is_complex:
        return shaped(case, torch.complex(made, torch.randn(count, generator=generator, dtype=torch.float64)).to(case.dtype))
    if case.dtype.is_floating_point:
        made = torch.randn(count, generator=generator, dtype=torch.float64)
    return shaped(case, made.abs().to(case.dtype) if case.dtype == torch.uint8 else made.to(case.dtype))


def shaped(case: Case, flat: torch.Tensor) -> torch.Tensor:
    if case.layout in ("transposed", "dense") and flat.numel() % 2 == 0:
        turned = flat.view(2, -1).t()
        return turned if case.layout == "transposed" else turned.contiguous()
    return flat[0].clone() if case.layout == "scalar" and flat.numel() else flat


def done(case: Case, work: object) -> None:
    if not case.wait:
        work.wait()  # type: ignore[attr-defined]


def run(case: Case, number: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The outputs of one operation on this rank."""
    return OPERATIONS[case.operation](case, number, group)


def _reduce(name: str) -> Callable[[Case, int, dist.ProcessGroup], list[torch.Tensor]]:
    def call(case: Case, number: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        rank, size = dist.get_rank(), dist.get_world_size()
        op = getattr(dist.ReduceOp, case.reduce_op)
        later = {"group": group, "async_op": not case.wait}
        mine = tensor(case, rank, number)
        if name == "all_reduce":
            done(case, dist.all_reduce(mine, op, **later))
        elif name == "all_reduce_coalesced":
            pair = [mine, tensor(case, rank, number + 1, 3)]
            with dist._coalescing_manager(group, async_ops=not case.wait) as manager:
                for each in pair:
                    dist.all_reduce(each, op, group=group)
            if not case.wait:
                manager.wait()
            return pair
        elif name == "reduce":
            done(case, dist.reduce(mine, size - 1, op, **later))
            return [mine] if rank == size - 1 else []
        elif name == "reduce_scatter":
            out = torch.zeros_like(mine)
            done(case, dist.reduce_scatter(out, [tensor(case, rank, number + each) for each in range(size)], op, **later))
            return [out]
        else:
            out = torch.zeros(case.size, dtype=case.dtype)
            parts = [tensor(case, rank, number + each).reshape(-1)[: case.size] for each in range(size)]
            whole = torch.cat([part.expand(case.size) if part.numel() == 1 else part for part in parts])
            done(case, dist.reduce_scatter_tensor(out, whole, op, **later))
            return [out]
        return [mine]

    return call


def broadcast(case: Case, number: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    mine = tensor(case, dist.get_rank(), number)
    done(case, dist.broadcast(mine, dist.get_world_size() - 1, group=group, async_op=not case.wait))
    return [mine]


def all_gather(case: Case, number: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    mine = tensor(case, dist.get_rank(), number)
    out = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    done(case, dist.all_gather(out, mine, group=group, async_op=not case.wait))
    return out


def all_gather_into_tensor(case: Case, number: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    mine = tensor(case, dist.get_rank(), number)
    out = torch.zeros(mine.numel() * dist.get_world_size(), dtype=case.dtype)
    part = mine.reshape(-1)
    if case.layout == "plain":  # FSDP2 gathers from a slice of the output itself
        part = out[dist.get_rank() * mine.numel() :][: mine.numel()]
        part.copy_(mine)
    done(case, dist.all_gather_into_tensor(out, part, group=group, async_op=not case.wait))
    return [out]


def all_gather_coalesced(case: Case, number: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    mine = [tensor(case, dist.get_rank(), number).reshape(-1), tensor(case, dist.get_rank(), number + 1, 3).reshape(-1)]
    out = [torch.zeros(each.numel() * dist.get_world_size(), dtype=case.dtype) for each in mine]
    with dist._coalescing_manager(group, async_ops=not case.wait) as manager:
        for whole, part in zip(out, mine, strict=True):
            dist.all_gather_into_tensor(whole, part, group=group)
    if not case.wait:
        manager.wait()
    return out


def all_to_all(case: Case, number: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [tensor(case, rank, number + each, case.size + each + rank) for each in range(size)]
    out = [torch.zeros_like(tensor(case, other, number, case.size + other + rank)) for other in range(size)]
    done(case, dist.all_to_all(out, mine, group=group, async_op=not case.wait))
    return out


def all_to_all_single(case: Case, number: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    mine = tensor(case, dist.get_rank(), number, case.size * dist.get_world_size()).reshape(-1)
    if case.layout == "scalar":
        mine = mine.expand(dist.get_world_size()).contiguous()
    out = torch.zeros_like(mine)
    done(case, dist.all_to_all_single(out, mine, group=group, async_op=not case.wait))
    return [out]


def uneven_all_to_all(case: Case, number: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Rank r sends r + k rows of two elements to rank k."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = [rank + each for each in range(size)]
    mine = tensor(Case(case.operation, case.dtype, 0), rank, number, 2 * sum(sent)).view(-1, 2)
    out = torch.zeros(sum(sent), 2, dtype=case.dtype)
    done(case, dist.all_to_all_single(out, mine, sent, sent, group=group, async_op=not case.wait))
    return [out]


def gather(case: Case, number: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    mine = tensor(case, dist.get_rank(), number)
    out = [torch.zeros_like(mine) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    done(case, dist.gather(mine, out, 0, group=group, async_op=not case.wait))
    return out or []


def scatter(case: Case, number: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    size = dist.get_world_size()
    out = torch.zeros_like(tensor(case, 0, number))
    parts = [tensor(case, each, number) for each in range(size)] if dist.get_rank() == size - 1 else None
    done(case, dist.scatter(out, parts, size - 1, group=group, async_op=not case.wait))
    return [out]


def send_recv(case: Case, number: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """A ring with two messages a pair, received by tag in the other order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [tensor(case, rank, number + each) for each in (0, 1)]
    out = [torch.zeros_like(each) for each in mine]
    works = [dist.isend(mine[tag], (rank + 1) % size, group=group, tag=tag) for tag in (0, 1)]
    works += [dist.irecv(out[tag], (rank - 1) % size, group=group, tag=tag) for tag in (1, 0)]
    for work in works:
        work.wait()
    return out


def recv_any(case: Case, number: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Rank 0 learns from whom it got what."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(tensor(case, rank, number), 0, group=group, tag=4)
        return []
    found = {}
    for _ in range(size - 1):
        out = torch.zeros_like(tensor(case, 0, number))
        found[dist.recv(out, None, group=group, tag=4)] = out
    return [found[source] for source in range(1, size)]


OPERATIONS: dict[str, Callable[[Case, int, dist.ProcessGroup], list[torch.Tensor]]] = {
    **{name: _reduce(name) for name in REDUCTIONS},
    **{name: globals()[name] for name in MOVES},
}


def lacks(case: Case) -> bool:
    """Whether gloo cannot do it: lists in all_to_all, complex numbers in gather and scatter, and messages of no size."""
    if case.operation in ("gather", "scatter"):
        return case.dtype.is_complex
    return case.operation == "all_to_all" or (case.operation in ("send_recv", "recv_any") and not case.size)


def known(case: Case, number: int) -> list[torch.Tensor]:
    """What an operation that gloo lacks must give, from the inputs of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if case.operation == "all_to_all":
        return [tensor(case, other, number + rank, case.size + other + rank) for other in range(size)]
    if case.operation == "send_recv":
        return [tensor(case, (rank - 1) % size, number + each) for each in (0, 1)]
    if case.operation == "scatter":
        return [tensor(case, rank, number)]
    first = int(case.operation == "recv_any")
    return [tensor(case, other, number) for other in range(first, size)] if rank == 0 else []


def same(one: torch.Tensor, other: torch.Tensor, *, bits: bool) -> bool:
    if one.dtype == torch.bool:  # gloo adds the bytes of True
        return torch.equal(one.view(torch.uint8) != 0, other.view(torch.uint8) != 0)
    if bits:
        return torch.equal(one, other)
    loose = {torch.float16: 1e-2, torch.bfloat16: 8e-2}.get(one.dtype, 1e-5)
    return torch.allclose(one, other, rtol=loose, atol=loose)


def compared(kind: str, gloo: dist.ProcessGroup, ours: dist.ProcessGroup) -> dict[str, object]:
    """How many cases were run on both groups, and those of which the results differ on this rank."""
    count, different = 0, []
    for number, case in enumerate(cases(kind)):
        dense = replace(case, layout="dense" if case.layout == "transposed" else case.layout)  # gloo refuses others
        expected = known(case, number) if lacks(case) else run(dense, number, gloo)
        found = run(case, number, ours)
        count += 1
        bits = exact(case, dist.get_world_size())
        if len(expected) != len(found) or not all(same(a, b, bits=bits) for a, b in zip(expected, found, strict=True)):
            different.append(f"{case}: {expected} {found}")
    # many under way at once, at another stage on each rank, waited for in another order than they were issued
    many = [tensor(Case("", torch.float32, 20_000 * (each % 4)), dist.get_rank(), each) for each in range(24)]
    sums = [each.clone() for each in many]
    for each in many:
        dist.all_reduce(each, group=gloo)
    works = []
    for place, each in enumerate(sums):
        works.append(dist.all_reduce(each, group=ours, async_op=True))
        if place == 1 and dist.get_rank() == 1:
            time.sleep(0.2)  # the second, a large one, is done on this rank before the third begins, and not on the others
    for work in reversed(works):
        work.wait()
    bits = dist.get_world_size() == 2
    different += [f"many {n}" for n, (a, b) in enumerate(zip(many, sums, strict=True)) if not same(a, b, bits=bits)]
    # the comparison itself must be able to see a difference
    one, other = (run(Case("all_reduce", torch.float32, 5, op), 0, ours) for op in ("SUM", "MAX"))
    return {
        "cases": count,
        "different": different[:5],
        "number": len(different),
        "sees": not same(one[0], other[0], bits=False),
    }
