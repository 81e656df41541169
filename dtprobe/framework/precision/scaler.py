"""A gradient scaler whose every decision is one decision of the whole job.

`torch.amp.GradScaler` decides on each rank by the gradients that the rank holds. Where they differ (stages of a pipeline,
parameters that are not reduced, a gradient that goes wrong after the reduction) one rank skips the step and halves its scale,
the others do not, and nothing says so. DTensor gradients are an exception: their found-inf is reduced over their own mesh,
which in a pipeline is not the whole job. Here found-inf is reduced once by MAX over all ranks between unscale and step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import SimpleNamespace, TracebackType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dtprobe.errors import UsageError
from dtprobe.framework.agreement import difference, named
from dtprobe.framework.errors import FrameworkError, RankError
from dtprobe.framework.precision.owngroup import OwnGroup

_COMPARED = ("optimizer", "updates", "scale", "growth tracker", "growth factor", "backoff factor", "growth interval")
_FLAGS = 3  # found inf, failed, has scaled


class ScalerDiverged(RankError):
    """Ranks came to the same decision with another state of the scaler, or one of them failed. Raised on every rank.

    `ranks` differ from the majority; with no majority all are listed. `differences` maps what differs (`optimizer`: its
    number by first use, `updates`: calls of `update`, `scale`, `growth tracker`, ...) to its value by rank.
    """

    def __init__(
        self, message: str, remedy: str = "", *, ranks: Any = (), differences: Mapping[str, Mapping[int, str]] | None = None
    ) -> None:
        super().__init__(message, remedy, ranks=ranks)
        self.differences = dict(differences or {})


class ConsistentScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that skips on all ranks of `group` (default: the world) or on none. Made on all of them.

    Use it as the stock one (https://docs.pytorch.org/docs/stable/amp.html), with any number of optimizers, `unscale_` for
    clipping, DTensor gradients of FSDP2 and tensor parallelism beside plain ones, and fused optimizers. `group` must hold
    every rank that trains the model: in a mesh of data, tensor and pipeline axes all of them. In a pipeline, scale in the
    loss function of the schedule; the other stages unscale without ever having called `scale`. `state_dict` is the stock one's.

    One MAX all-reduce of 17 float64 an optimizer and step carries found-inf and, at no further message, whether all ranks
    are at the same optimizer with the same scale. `unscale_` waits for it (on a GPU: one synchronisation).
    `timeout_s` (seconds) bounds each; raises MissingRanks naming the ranks that did not come, ScalerDiverged naming those that
    came with something else, both on every rank. `close`, or leaving it as a context manager, ends its group.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        ranks = None if group is None else dist.get_process_group_ranks(group)
        self._company = OwnGroup(ranks, label="scaler", timeout_s=timeout_s) if self._enabled else None
        self._numbers: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._next = itertools.count()
        self._has_scaled = False
        self._decisions = self._updates = self._skipped = 0

    @property
    def decisions(self) -> int:
        """How many decisions the ranks have taken together, one an optimizer and step."""
        return self._decisions

    @property
    def skipped(self) -> int:
        """How many of them were to skip: the same number on every rank."""
        return self._skipped

    def scale(self, outputs: Any) -> Any:
        """As the stock scaler's `scale`."""
        self._has_scaled = True
        return super().scale(outputs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As the stock scaler's `update`; local, because every rank has the same found-inf."""
        super().update(new_scale)
        self._updates += 1

    def close(self) -> None:
        """End the group of the scaler. Its state can still be read and saved."""
        if self._company is not None:
            self._company.close()

    def __enter__(self) -> ConsistentScaler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("a ConsistentScaler has a process group, which cannot be pickled", "save its state_dict()")

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None:  # a stage that has no loss never scales; whether anyone did is part of the decision
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        local = cast(torch.optim.Optimizer, SimpleNamespace(param_groups=[{"params": _plain(optimizer)}]))
        device = cast(torch.Tensor, self._scale).device
        try:
            found = super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16)
        except (ValueError, RuntimeError):  # the others must not wait for this rank
            self._decide(optimizer, torch.zeros((), device=device), failed=True)
            raise
        worst = torch.stack([each.to(device, torch.float64) for each in found.values()] or [inv_scale.double() * 0]).max()
        return {device: self._decide(optimizer, worst)}

    def _decide(self, optimizer: torch.optim.Optimizer, found: torch.Tensor, *, failed: bool = False) -> torch.Tensor:
        """Found-inf of the whole job (float32, on the scale's device)."""
        assert self._company is not None and self._scale is not None and self._growth_tracker is not None
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._next)
        number = self._numbers[optimizer]
        what = f"decision {self._decisions} of the scaler (optimizer {number}, after {self._updates} updates)"
        device = self._scale.device
        known = torch.tensor([failed, self._has_scaled, number, self._updates], dtype=torch.float64)
        factors = torch.tensor([self._growth_factor, self._backoff_factor, self._growth_interval], dtype=torch.float64)
        known, factors = known.to(device), factors.to(device)
        state = torch.stack([self._scale.double(), self._growth_tracker.double()])
        compared = torch.cat([known[2:], state, factors])
        said = torch.cat([found.double().reshape(1), known[:2], compared, -compared])
        agreed = self._company.maximum(said, what)
        values = agreed.tolist()
        inf, any_failed, any_scaled = values[:_FLAGS]
        high, low = values[_FLAGS : _FLAGS + len(_COMPARED)], values[_FLAGS + len(_COMPARED) :]
        if any_failed or any(most != -least for most, least in zip(high, low, strict=True)):
            self._raise_diverged(what, failed, compared)
            return found.float()  # only where this rank is the one that failed: its own error is on its way
        if not any_scaled:
            raise FrameworkError(f"{what}: no rank has called scale() yet", "call scaler.scale(loss).backward()")
        self._decisions += 1
        self._skipped += bool(inf)
        return agreed[0].float()

    def _raise_diverged(self, what: str, failed: bool, compared: torch.Tensor) -> None:
        assert self._company is not None
        own = {name: f"{value:g}" for name, value in zip(_COMPARED, compared.tolist(), strict=True)}
        heard = self._company.gathered((failed, own), what)
        broken = [rank for rank, (has_failed, _) in heard.items() if has_failed]
        found = difference({rank: said for rank, (_, said) in heard.items()}, _COMPARED)
        if failed:
            return
        if found is None:
            raise ScalerDiverged(f"{what}: {named(broken)} could not unscale", "see the error of that rank", ranks=broken)
        shown = "; ".join(
            f"{field}: " + ", ".join(f"rank {rank} {value}" for rank, value in sorted(values.items()))
            for field, values in found.fields.items()
        )
        blamed = f"{named(found.ranks)} differ" if found.decided else "no majority decides who is wrong"
        raise ScalerDiverged(
            f"{what}: the ranks' scalers differ ({blamed}): {shown}",
            "make every rank call unscale_, step and update for the same optimizers in the same order, with the same settings",
            ranks=found.ranks,
            differences=found.fields,
        )


def _plain(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's parameters; in place of a DTensor its local part, which shares memory with it.

    Local parts need no reduction of their own, and may stand beside plain tensors in one call (mixed ones are refused).
    """
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter.grad, DTensor):
                gradient = parameter.grad.to_local()
                parameter = gradient.detach()  # noqa: PLW2901  (anything of the gradient's shape that can hold it)
                parameter.grad = gradient
            found.append(parameter)
    return found
