"""Faults of collectives at c10d, for every backend: one rank's call is missing, late, doubled, another, or carries other data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Literal

from dtprobe.inject import Firing, Injection, Injector, Site
from dtprobe.inject.counted import NAMES, REDUCING, ROOTED, WITHOUT_DATA, check_op, part, why_not
from dtprobe.inject.inrank import Plan, firings, refusals
from dtprobe.inject.spec import Fault

WITH_DATA = tuple(name for name in NAMES if name not in WITHOUT_DATA)
POINT_TO_POINT = ("send", "recv")

Instead = Literal[
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "barrier",
]
Type = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"]
Reduction = Literal["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
Raised = Literal[
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "DistError",
    "RuntimeError",
    "ValueError",
    "TimeoutError",
    "KeyboardInterrupt",
]
Where = Literal["input", "output"]


@dataclass(frozen=True, kw_only=True)
class Skip:
    """The call does nothing and its handle is done at once: the other ranks wait for this one."""


@dataclass(frozen=True, kw_only=True)
class Delay:
    """The calling thread waits `seconds` before the call."""

    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 3600:
            raise ValueError(f"seconds={self.seconds:g} is not between 0 and 3600")


@dataclass(frozen=True, kw_only=True)
class Duplicate:
    """The call is issued twice, first with copies of its tensors: from then on this rank is one call ahead of the others."""


@dataclass(frozen=True, kw_only=True)
class OtherOp:
    """Another collective is issued instead, on the call's first tensor."""

    instead: Instead = "broadcast"


@dataclass(frozen=True, kw_only=True)
class Size:
    """The call has `elements` elements a rank, by default half as many: the first ones, or padded by zeros."""

    elements: int | None = None

    def __post_init__(self) -> None:
        if self.elements is not None and not 1 <= self.elements <= 2**31:
            raise ValueError(f"elements={self.elements} is not between 1 and 2**31")


@dataclass(frozen=True, kw_only=True)
class Dtype:
    """The call has tensors of another dtype: the same bytes where an element is as large, else converted there and back."""

    to: Type


@dataclass(frozen=True, kw_only=True)
class Root:
    """The call names another root or peer, a rank within its group: `root`, by default the next one."""

    root: int | None = None

    def __post_init__(self) -> None:
        if self.root is not None and self.root < 0:
            raise ValueError(f"root={self.root} is negative")


@dataclass(frozen=True, kw_only=True)
class ReduceOp:
    """The call reduces by another operation, by default max instead of sum, and sum instead of any other."""

    to: Reduction | None = None


@dataclass(frozen=True, kw_only=True)
class GroupOrder:
    """The nth group that this rank creates (new_group and what calls it) and the one after it are exchanged, as if created in
    the other order. Both must have the same members."""


@dataclass(frozen=True, kw_only=True)
class DropHandle:
    """The handle of an isend (or irecv, by op=recv) is dropped at once, which cancels a message that is not yet on its way."""


@dataclass(frozen=True, kw_only=True)
class Corrupt:
    """One bit of one element is flipped: in the result once the caller has waited for it (`output`), or in what goes in.
    By default in the result where the call has one. `bit` counts from the lowest; by default the third highest, which
    changes floating numbers by many orders of magnitude and leaves them finite."""

    element: int = 0
    bit: int | None = None
    where: Where | None = None

    def __post_init__(self) -> None:
        _element(self.element)
        if self.bit is not None and not 0 <= self.bit < 128:
            raise ValueError(f"bit={self.bit} is not between 0 and 127")


@dataclass(frozen=True, kw_only=True)
class Nan:
    """One element is not a number: in the result once the caller has waited for it (`output`), or in what goes in."""

    element: int = 0
    where: Where | None = None

    def __post_init__(self) -> None:
        _element(self.element)


@dataclass(frozen=True, kw_only=True)
class Raise:
    """The call raises instead of being issued."""

    type: Raised = "DistBackendError"


def _element(value: int) -> None:
    if value < 0:
        raise ValueError(f"element={value} is negative")


TAKES = {
    "reduce_op": REDUCING,
    "root": ROOTED,
    "drop_handle": POINT_TO_POINT,
    "size": WITH_DATA,
    "dtype": WITH_DATA,
    "corrupt": WITH_DATA,
    "nan": WITH_DATA,
    "other_op": WITH_DATA,
}
"""Actions that only some collectives can take; without `op` those are meant."""


def check(fault: Fault) -> None:
    """Raises ValueError for a collective that does not exist, or that cannot take this fault."""
    op, able = fault.target.op, TAKES.get(fault.action)
    check_op(op)
    if fault.action == "group_order":
        if op is not None:
            raise ValueError(f"group_order counts groups as they are created, so op={op} means nothing")
    elif op is not None and able is not None and op not in able:
        raise ValueError(f"{op} cannot take {fault.action}; it is for {', '.join(able)}")
    if isinstance(fault.config, OtherOp) and fault.config.instead == op:
        raise ValueError(f"instead={op} is the same collective")


class CollectiveInjection(Injection):
    """Everything happens inside the rank: this side writes the plan and reads what fired."""

    def __init__(self, fault: Fault, site: Site) -> None:
        self.fault = fault
        self.site = site
        self._plan = Plan(site, "collective", Path(__file__).with_name("collective_faults.py"))
        self._fired: tuple[Firing, ...] = ()

    def prepare(self) -> None:
        config = self.fault.config
        assert is_dataclass(config) and not isinstance(config, type)
        action = self.fault.action
        ops = POINT_TO_POINT[:1] if action == "drop_handle" else TAKES.get(action)
        self._plan.write(
            {
                **part(self.fault.target, self.site),
                "action": action,
                "config": asdict(config),
                "ops": ops and list(ops),
                "text": f"injected: {self.fault}",
            }
        )

    def environ(self, rank: int | None) -> Mapping[str, str]:
        return self._plan.environ() if rank is None or self.fault.target.hits(rank) else {}

    def stop(self) -> tuple[Firing, ...]:
        self._plan.remove()
        self._fired = firings(self.site)
        return self._fired

    def problems(self) -> tuple[str, ...]:
        """Where the fault could not be applied, and why it never fired; one sentence each."""
        found = list(dict.fromkeys(refusals(self.site)))
        what = "new_group" if self.fault.action == "group_order" else "collective"
        return tuple(found if self._fired else [*found, *why_not(self.fault.target, self.site, what)])


injector = Injector(
    name="collective",
    layer="c10d",
    title="a rank's collective is missing, late, doubled, another one, or carries other data; groups in another order",
    certifies_not="What happens below c10d: backends, NCCL, links, GPU kernels. Calls that a backend object gets directly, or a"
    " process group written in Python keeps to itself, pass by.",
    needs=("linux",),
    actions={
        "skip": Skip,
        "delay": Delay,
        "duplicate": Duplicate,
        "other_op": OtherOp,
        "size": Size,
        "dtype": Dtype,
        "root": Root,
        "reduce_op": ReduceOp,
        "group_order": GroupOrder,
        "drop_handle": DropHandle,
        "corrupt": Corrupt,
        "nan": Nan,
        "raise": Raise,
    },
    targets=("rank", "op", "group", "nth", "after_s", "every", "times", "probability"),
    make=CollectiveInjection,
    check=check,
)
