"""Whether two calls can meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dtprobe.readers.flight_columns import Kind

Difference = Literal["op", "dtype", "size"]

SAME_SIZES = frozenset(
    (
        *(
            "all_reduce",
            "allreduce",
            "allreduce_coalesced",
            "all_reduce_barrier",
            "broadcast",
            "reduce",
            "all_gather",
            "allgather",
        ),
        *("_all_gather_base", "_allgather_base", "all_gather_into_tensor", "_allgather_into_tensor_coalesced"),
        *("_reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_tensor_coalesced"),
        *("_all_gather_base_coalesced", "_reduce_scatter_base_coalesced"),
    )
)
"""Operations to which all members bring as many elements. Others, and those that nobody knows, may be uneven by right."""


def base(op: str) -> str:
    """The operation without its wrapping in a batch."""
    return op.removeprefix("coalesced ").partition("+")[0]


def difference(one: Kind, other: Kind) -> Difference | None:
    """What keeps two calls of one place from being the same collective; None where nothing that both dumps tell does."""
    if one.op != other.op:
        return "op"
    if one.dtypes and other.dtypes and set(one.dtypes) != set(other.dtypes):
        return "dtype"
    if base(one.op) in SAME_SIZES and one.ins is not None and other.ins is not None and sum(one.ins) != sum(other.ins):
        return "size"
    return None


class Meeting:
    """`difference` between numbered kinds, each pair told once."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._kinds = kinds
        self._told: dict[tuple[int, int], Difference | None] = {}
        self._alike: dict[int, int] = {}
        self._firsts: dict[tuple[str, int, tuple[str, ...] | None], int] = {}

    def difference(self, one: int, other: int) -> Difference | None:
        if one == other:
            return None
        key = one, other
        if key not in self._told:
            self._told[key] = difference(self._kinds[one], self._kinds[other])
        return self._told[key]

    def same(self, one: int, other: int) -> bool:
        return one == other or self.difference(one, other) is None

    def alike(self, kind: int) -> int:
        """The first of the kinds that can meet each other."""
        if kind not in self._alike:
            one = self._kinds[kind]
            size = sum(one.ins) if one.ins is not None and base(one.op) in SAME_SIZES else -1
            self._alike[kind] = self._firsts.setdefault((one.op, size, one.dtypes), kind)
        return self._alike[kind]
