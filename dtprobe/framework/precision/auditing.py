"""An audit of one training step: is the gradient that each rank was left with the mean of what the ranks computed?

DDP and FSDP2 reduce only what comes past them. A gradient that takes another way stays the rank's own, training goes on, and
the replicas drift apart in silence. The audit takes each rank's gradient where autograd hands it over, before the wrapper can
touch it, takes what the wrapper left when backward has ended, and compares the mean of the first with the second in a few
random projections, so that no gradient is sent anywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from dtprobe.framework.errors import RankError
from dtprobe.framework.precision.owngroup import OwnGroup
from dtprobe.framework.precision.projection import Projector
from dtprobe.framework.precision.verdicts import Loss, Measured, judged
from dtprobe.framework.precision.wrapped import Unjudged, Wrapped, wrapped


class GradientLoss(RankError):
    """Gradients were lost in a step; `losses` says which, `ranks` who was left with a wrong one. Raised on every rank."""

    def __init__(self, losses: tuple[Loss, ...]) -> None:
        lines = "\n  ".join(str(loss) for loss in losses[:20]) + (
            f"\n  and {len(losses) - 20} more" if len(losses) > 20 else ""
        )
        super().__init__(
            f"{len(losses)} parameters were left with a gradient that is not the mean over the ranks:\n  {lines}",
            ranks={rank for loss in losses for rank in loss.ranks},
        )
        self.losses = losses


@dataclasses.dataclass
class Report:
    """What an audited step showed; the same on every rank but for `cost_s`. True where something was lost.

    `without_gradient`: parameters that no rank computed a gradient for (unused, or cut off by detach). `unjudged`: those whose
    gradient cannot be compared (sparse, or sharded along another dim than the first). `cost_s`: seconds this rank spent on it.
    Empty until the step has ended.
    """

    losses: tuple[Loss, ...] = ()
    without_gradient: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    checked: int = 0
    cost_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.losses)

    def __iter__(self) -> Iterator[Loss]:
        return iter(self.losses)

    def __str__(self) -> str:
        head = f"reduction audit: {self.checked} parameters, {len(self.losses)} lost, {self.cost_s * 1e3:.1f} ms"
        notes = [f"no gradient on any rank: {', '.join(self.without_gradient)}"] if self.without_gradient else []
        notes += [f"not compared: {', '.join(self.unjudged)}"] if self.unjudged else []
        return "\n  ".join([head, *(str(loss) for loss in self.losses), *notes])

    def check(self) -> None:
        """Raise GradientLoss if something was lost."""
        if self.losses:
            raise GradientLoss(self.losses)


class ReductionAudit:
    """Audits steps of `model` (DDP, or the root of `fully_shard`); make it on all ranks that the model is averaged over.

    `ignore` names parameters that are meant to differ between ranks. `tolerance` is relative to the norm of the ranks' gradients
    (default: 1e-4, and 1/32 where half precision or a communication hook takes part). `timeout_s` (seconds) bounds the
    exchange at the end of each step; raises MissingRanks naming who did not come. `close` ends its group.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ignore: Collection[str] = (),
        tolerance: float | None = None,
        timeout_s: float = 300.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._wrapped = wrapped(model, frozenset(ignore))
        self._tolerance = tolerance
        self._clock = clock
        self._projector = Projector()
        self._company = OwnGroup(self._wrapped.ranks, label="audit", timeout_s=timeout_s)
        self._steps = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[Report]:
        """Audit what happens in the `with` block: one step, from its first forward to the end of its last backward or later.

        Micro-batches accumulate as usual; unscaling, clipping, the optimizer's step and zero_grad may be in it. The report is
        filled when the block ends, on all ranks together; a block that raises is not audited.
        """
        report = Report()
        window = _Window(self._wrapped, self._projector, self._clock)
        with window:
            yield report
        begun = self._clock()
        own = window.measured()
        heard = self._company.gathered(own, f"audit of step {self._steps}")
        tolerance = self._tolerance if self._tolerance is not None else self._wrapped.tolerance
        names = list(dict.fromkeys(name for measured in heard.values() for name in measured))
        losses = []
        for name in names:
            each = {rank: measured[name] for rank, measured in heard.items() if name in measured}
            loss = judged(name, each, self._wrapped.ranks, tolerance)
            losses += [loss] if loss is not None else []
            if not all(one.judged for one in each.values()):
                report.unjudged += (name,)
            elif not any(one.computed or one.left for one in each.values()):
                report.without_gradient += (name,)
        if losses:
            facts = self._company.gathered(self._wrapped.facts(window.came), f"audit of step {self._steps}")
            losses = [dataclasses.replace(loss, because=self._wrapped.because(loss, facts)) for loss in losses]
        report.losses, report.checked = tuple(losses), len(names)
        report.cost_s = window.cost_s + self._clock() - begun
        self._steps += 1

    def close(self) -> None:
        """End the audit's group on this rank."""
        self._company.close()

    def __enter__(self) -> ReductionAudit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def audit(model: nn.Module, **options: Any) -> Iterator[Report]:
    """Audit the one step in the `with` block; `options` are those of ReductionAudit. Use that for more than one step."""
    with ReductionAudit(model, **options) as whole, whole.step() as report:
        yield report


class _Window:
    """One step of one rank: hooks that measure gradients as they come and as they are left."""

    def __init__(self, model: Wrapped, projector: Projector, clock: Callable[[], float]) -> None:
        self._model = model
        self._of = projector.of
        self._clock = clock
        self._handles: list[Any] = []
        self._pending = False
        self._left: dict[str, torch.Tensor | None] = {}
        self._base: dict[str, torch.Tensor | None] = {}
        self._before: dict[str, torch.Tensor | None] = {}
        self._unjudged: set[str] = set()
        self._coming: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.computed: dict[str, torch.Tensor] = {}
        self.came: Counter[str] = Counter()
        self.cost_s = 0.0

    def __enter__(self) -> None:
        self._handles = self._model.watch(self._timed(self._came), self._added)
        self._handles.append(self._model.root().register_forward_hook(self._forwarded))
        if self._model.partial:
            self._handles.append(self._model.root().register_forward_pre_hook(self._timed(self._forwarding)))
        self._handles.append(register_optimizer_step_pre_hook(self._timed(self._stepping)))

    def __exit__(self, kind: object, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if kind is None:
            begun = self._clock()
            # a gradient that came through backward was measured when that ended: since then it may have been clipped
            self._measure([name for name in self._model.parameters() if self._pending or name not in self._left])
            self.cost_s += self._clock() - begun

    def measured(self) -> dict[str, Measured]:
        """Name -> what this rank found of it."""
        return {
            name: Measured(
                _numbers(self.computed.get(name, self._before.get(name))),
                _numbers(self._left.get(name)),
                self._model.replica(name),
                name not in self._unjudged,
                _numbers(self._base.get(name)),
            )
            for name in self._model.parameters()
        }

    def _forwarding(self, *_: Any) -> None:
        """What is in .grad now counts for this rank, also where it will have no part in this backward."""
        for name in self._model.parameters():
            held = self._gradient(name)
            self._before[name] = None if held is None else self._of(*held)

    def _forwarded(self, module: nn.Module, args: Any, output: Any) -> None:
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(lambda _: self._begin())

    def _begin(self) -> None:
        """A backward is under way: measure at its end, after the wrapper's own end, which is put in the queue later than this.

        The first to notice is in the outermost backward; those that checkpointing starts within it are part of it.
        """
        if self._pending or not self._handles:  # a backward after the window is nobody's business
            return
        self._pending = True
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(self._timed(self._ended)))

    def _came(self, name: str, gradient: torch.Tensor) -> None:
        self._begin()
        if gradient.is_sparse:
            self._unjudged.add(name)
            return
        before = self._gradient(name)
        if not self._model.sharded(name):
            # what the wrapper finds in .grad when it reduces: this gradient and all that was accumulated before
            self._coming[name] = self._of(gradient if before is None else before[0] + gradient), None
            return
        held, new = None if before is None else self._of(*before), self._of(gradient)
        if name in self.computed and _same(held, self._left.get(name)):
            self._coming[name] = self.computed[name] + new, self._base[name]
        else:
            self._coming[name] = new, held

    def _added(self, name: str) -> None:
        """The gradient went into `.grad`; one that torch.autograd.grad hands out does not."""
        if name in self._coming:
            self.computed[name], self._base[name] = self._coming.pop(name)
            self.came[name] += 1

    def _ended(self) -> None:
        self._pending = False
        self._measure(list(self.computed))

    def _stepping(self, *_: Any) -> None:
        """Gradients that did not come through backward are measured as the optimizer finds them."""
        self._measure([name for name in self._model.parameters() if name not in self.computed and name not in self._left])

    def _measure(self, names: list[str]) -> None:
        for name in names:
            held = self._gradient(name)
            if held is not None or name in self.computed:
                self._left[name] = None if held is None else self._of(*held)

    def _gradient(self, name: str) -> tuple[torch.Tensor, int] | None:
        try:
            return self._model.left(name)
        except Unjudged:
            self._unjudged.add(name)
            return None

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            begun = self._clock()
            call(*args)
            self.cost_s += self._clock() - begun

        return timed


def _numbers(tensor: torch.Tensor | None) -> list[float] | None:
    return None if tensor is None else tensor.tolist()


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return other is None if one is None else other is not None and torch.equal(one, other)
