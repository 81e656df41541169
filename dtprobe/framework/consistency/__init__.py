"""The cross-rank consistency check: state that must be equal on all ranks is, or who differs where is named.

A loss or a norm does not see one flipped bit among ten million. Here each rank hashes its tensors' bits at about memory
speed, the ranks compare a few hundred bytes over the job's store, and only where digests differ do they bisect to the tensor,
the element and the values. A rank that does not come is named before the deadline. Its counterpart, `require_distinct`, is for
what must differ: ranks that were given the same batch.

    require_consistent({"model": model, "optimizer": optimizer})
    guard = Every(100)
    for step, batch in enumerate(loader):
        ...
        guard(step, {"model": model, "optimizer": optimizer})

All ranks of the group call it at the same point. What a rank holds is read, never sent, except for the elements that differ.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from dtprobe.errors import Unavailable, UsageError
from dtprobe.framework.consistency.compare import Comparison
from dtprobe.framework.consistency.distinct import require_distinct
from dtprobe.framework.consistency.entries import entries
from dtprobe.framework.consistency.meeting import meeting_of
from dtprobe.framework.consistency.report import Difference, Held, Incomparable, Inconsistent, NotDistinct, Report
from dtprobe.framework.part import torch_distributed

__all__ = [
    "FIELDS",
    "Difference",
    "Every",
    "Held",
    "Incomparable",
    "Inconsistent",
    "NotDistinct",
    "Report",
    "check",
    "probe",
    "require_consistent",
    "require_distinct",
    "rng_state",
]

FIELDS = ("values", "shapes", "dtypes", "placements", "strides", "requires_grad", "order")
"""What can be compared. Names always are. Without `values` nothing is read, and a check costs one agreement."""

_BITS_NEED = ("shapes", "dtypes", "placements")


def probe() -> Unavailable | None:
    """None where torch.distributed was built in."""
    return torch_distributed()


def check(
    state: Any,
    *,
    group: dist.ProcessGroup | None = None,
    what: Collection[str] = FIELDS,
    timeout_s: float = 60.0,
    limit: int = 8,
    step: int | None = None,
) -> Report:
    """Compare `state` across the ranks of `group` (default: the default group), bit by bit: -0.0 is not 0.0, nor one NaN another.

    `state`: a tensor, Module, Optimizer, iterator of (name, tensor) pairs, or nested mappings and sequences of these and of plain
    values. Of a DTensor each part is compared between the ranks that hold a replica of it. `what` chooses among FIELDS; bits
    that are compared need equal shapes, dtypes and placements, so `values` brings those. At most `limit` differences are
    followed to the element. `step` names the occasion, and must be the same on all ranks.

    Returns the same findings on every rank. Raises, on every rank: Incomparable when ranks ask for different checks or something
    cannot be compared (meta, fake, sparse, nested, quantized, Partial); MissingRanks naming those that did not come within
    `timeout_s` of another (seconds; a check that finds something takes a few exchanges, each with this deadline). The check reads the
    tensors in place on the current stream; a tensor that is not contiguous is copied for the time.

    Not everything is meant to be equal. Under DDP running statistics (BatchNorm) differ from each forward to the next, when
    rank 0's are broadcast, and so do generators that drive dropout: leave them out (`model.named_parameters()`).
    """
    unknown = sorted(set(what) - set(FIELDS))
    if unknown or not what:
        raise UsageError(f"what={sorted(what)} is not a choice of {', '.join(FIELDS)}", "leave it out to compare all")
    if limit < 1:
        raise UsageError(f"limit={limit} differences", "give a number of at least 1")
    meeting = meeting_of(group)
    wanted = sorted({*what, *(_BITS_NEED if "values" in what else ())})
    said = {"call": "consistency check", "what": wanted, "step": step}
    with torch.no_grad(), meeting.telling(said, timeout_s):
        own = Comparison(entries(state, meeting.members), wanted)
    return own.across(meeting, said, timeout_s=timeout_s, limit=limit)


def require_consistent(
    state: Any,
    *,
    group: dist.ProcessGroup | None = None,
    what: Collection[str] = FIELDS,
    timeout_s: float = 60.0,
    limit: int = 8,
    step: int | None = None,
) -> Report:
    """As `check`, and raises Inconsistent on every rank when anything differs; it names the ranks and carries the report."""
    report = check(state, group=group, what=what, timeout_s=timeout_s, limit=limit, step=step)
    if not report.consistent:
        raise Inconsistent(report)
    return report


class Every:
    """`require_consistent` on every `steps`-th step, and nothing but a comparison of two numbers on the others."""

    def __init__(
        self, steps: int, *, group: dist.ProcessGroup | None = None, what: Collection[str] = FIELDS, timeout_s: float = 60.0
    ) -> None:
        if steps < 1:
            raise UsageError(f"a check every {steps} steps", "give a number of at least 1")
        self._steps = steps
        self._group = group
        self._what = what
        self._timeout_s = timeout_s

    def __call__(self, step: int, state: Any) -> Report | None:
        """Check when `step` is a multiple of the period, 0 too; None on other steps. Ranks at different steps are Incomparable."""
        if step % self._steps:
            return None
        return require_consistent(state, group=self._group, what=self._what, timeout_s=self._timeout_s, step=step)


def rng_state() -> dict[str, torch.Tensor]:
    """The states of torch's generators on this rank, to be compared where ranks must draw alike: CPU and current accelerator."""
    states = {"cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        states[kind.type] = torch.get_device_module(kind).get_rng_state()
    return states
