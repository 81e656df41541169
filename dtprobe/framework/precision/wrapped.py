"""What the audit has to know of a wrapper: which gradients it averages over which ranks, where they are, and why one was not.

The wrappers have no public word for much of this; what is read of theirs is named here and nowhere else (torch 2.9 to 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from dtprobe.errors import UsageError
from dtprobe.framework.precision.reduction import param_groups
from dtprobe.framework.precision.verdicts import Kind, Loss

Facts = Mapping[str, Any]
"""What one rank knows about how its step went; exchanged only where something was lost."""

Came = Callable[[str, torch.Tensor], None]
"""Told the name of a parameter and its new gradient, before that is added to `.grad`."""

Added = Callable[[str], None]
"""Told the name of a parameter whose new gradient was added to `.grad`."""


class Wrapped(Protocol):
    """A wrapped model, as the audit sees it."""

    ranks: tuple[int, ...]
    tolerance: float
    partial: bool
    """Whether a rank may have no part in the gradient of a parameter that others have."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are to be trained, by name without wrappers; asked from `watch` on."""
        ...

    def root(self) -> nn.Module:
        """The module whose outputs the backward begins at."""
        ...

    def watch(self, came: Came, added: Added) -> list[Any]:
        """Register what calls `came` and `added`; handles with `remove()`."""
        ...

    def sharded(self, name: str) -> bool:
        """Whether this rank has a part of the gradient only, to which each reduction is added."""
        ...

    def replica(self, name: str) -> int:
        """Ranks of one number hold the parts of one whole gradient."""
        ...

    def left(self, name: str) -> tuple[torch.Tensor, int] | None:
        """The gradient this rank was left with and its place in the whole, flattened. Raises Unjudged where that is not known."""
        ...

    def facts(self, came: Mapping[str, int]) -> Facts: ...

    def because(self, loss: Loss, facts: Mapping[int, Facts]) -> str: ...


class Unjudged(Exception):
    """A gradient of a form that the audit does not compare: sparse, or split along another dim than the first."""


def wrapped(model: nn.Module, ignore: frozenset[str]) -> Wrapped:
    """The view of `model`; raises UsageError for a model that is under neither DDP nor `fully_shard`."""
    if isinstance(model, DistributedDataParallel):
        return Ddp(model, ignore)
    if isinstance(model, FSDPModule):
        return Fsdp2(model, ignore)
    raise UsageError(
        f"{type(model).__name__} is neither a DistributedDataParallel nor the root of a fully_shard",
        "pass the wrapped model itself; in a pipeline, that of this rank's stage",
    )


class Ddp:
    """A DistributedDataParallel model. Parameters that DDP was told to ignore are left out."""

    def __init__(self, model: DistributedDataParallel, ignore: frozenset[str]) -> None:
        self._model = model
        self._ignore = ignore | frozenset(model.parameters_to_ignore)
        self.ranks = tuple(dist.get_process_group_ranks(model.process_group))
        halves = any(parameter.itemsize < 4 for parameter in model.parameters())
        # a hook may compress to half precision by choice
        self.tolerance = 2.0**-5 if halves or model._comm_hooks else 1e-4
        self.partial = model.find_unused_parameters or model.static_graph
        self._forwards = 0
        self._synced = True

    def parameters(self) -> dict[str, nn.Parameter]:
        return {
            name: parameter
            for name, parameter in self._model.module.named_parameters()
            if parameter.requires_grad and name not in self._ignore
        }

    def root(self) -> nn.Module:
        return self._model.module

    def watch(self, came: Came, added: Added) -> list[Any]:
        self._forwards = 0
        handles: list[Any] = [self._model.register_forward_pre_hook(self._forward)]
        for name, parameter in self.parameters().items():
            handles += told(parameter, name, came, added)
        return handles

    def sharded(self, name: str) -> bool:
        return False

    def replica(self, name: str) -> int:
        return dist.get_rank()

    def left(self, name: str) -> tuple[torch.Tensor, int] | None:
        return plain_gradient(self._model.module.get_parameter(name))

    def facts(self, came: Mapping[str, int]) -> Facts:
        reduced = {id(one) for bucket in self._model.reducer._get_zeros_like_grad_buckets() for one in bucket.parameters()}
        present = {id(parameter) for parameter in self._model.module.parameters()}
        at_wrap = {id(parameter): parameter for parameter in self._model._module_parameters}
        hooks = [getattr(hook, "__qualname__", type(hook).__name__) for hook, _ in self._model._comm_hooks]
        return {
            "forwards": self._forwards,
            "synced": self._synced,
            "hook": hooks[0] if hooks else "",
            "reduced": [name for name, one in self._model.module.named_parameters() if id(one) in reduced],
            "frozen": [
                name for name, one in self._model.module.named_parameters() if id(one) in at_wrap and id(one) not in reduced
            ],
            "orphans": [list(one.shape) for key, one in at_wrap.items() if key not in present],
            "shapes": {name: list(one.shape) for name, one in self.parameters().items()},
            "came": dict(came),
        }

    def because(self, loss: Loss, facts: Mapping[int, Facts]) -> str:
        here = facts[loss.ranks[0]]
        hook = f"the communication hook {here['hook']}" if here["hook"] else ""
        name, size = loss.parameter, len(self.ranks)
        if name not in here["reduced"]:
            if name in here["frozen"]:
                return "it was frozen when DDP wrapped the model and unfrozen since: DDP does not reduce it; wrap again"
            if here["shapes"].get(name) in here["orphans"]:
                return "it was replaced after the wrap: DDP still holds the old one and does not reduce this; wrap again"
            return "it was added after the wrap: DDP does not know it; wrap again"
        if loss.kind is Kind.SCALED and loss.factor is not None and _near(loss.factor, size):
            return f"{hook or 'something'} sums over {size} ranks and does not divide by {size}"
        if loss.kind is Kind.SCALED and loss.factor is not None and _near(loss.factor, 1 / size):
            return f"{hook or 'something'} divides by {size} twice"
        if name not in here["came"]:
            return (
                "its gradient did not come through backward (torch.autograd.grad?), which is where DDP reduces; call backward()"
            )
        if not here["forwards"]:
            return (
                "the forward went past DDP (its .module or a part of it was called), so nothing was reduced; call the DDP model"
            )
        if loss.kind is Kind.UNREDUCED and not hook and here["came"][name] > here["forwards"]:
            return (
                f"it got {here['came'][name]} gradients from {here['forwards']} forward of the DDP model: one went past DDP after the "
                "reduction; call the DDP model only, and sum the losses for one backward"
            )
        if not here["synced"]:
            return "the last forward ran under no_sync(); leave that block for the last micro-batch"
        silent = sorted(set(here["reduced"]) - set(here["came"]))
        if hook:
            own = "its own bucket, unreduced" if loss.kind is Kind.UNREDUCED else "something else than the mean of its bucket"
            return f"{hook} returned {own}"
        if silent and loss.kind is Kind.UNREDUCED:
            few = ", ".join(silent[:3]) + (f" and {len(silent) - 3} more" if len(silent) > 3 else "")
            return f"its bucket waits for {few}, which got no gradient, and was not reduced; find_unused_parameters=True"
        return "DDP reduced it, and something changed it between backward and the reduction's end or after it"

    def _forward(self, *_: Any) -> None:
        self._forwards += 1
        self._synced = self._model.require_backward_grad_sync


class Fsdp2:
    """The root of a model under `fully_shard`, over a mesh of one axis, or two (replicas of shards)."""

    def __init__(self, model: FSDPModule, ignore: frozenset[str]) -> None:
        self._model: Any = model
        self._ignore = ignore
        groups = [group for group in self._groups() if group.fsdp_params]
        if not groups:
            raise UsageError("no module of this model holds parameters of fully_shard", "wrap it, then audit it")
        if any(one.is_dtensor for group in groups for one in group.fsdp_params):
            raise UsageError(
                "parameters of tensor parallelism under fully_shard are not audited", "audit the model without that axis"
            )
        self._mesh = groups[0].fsdp_params[0].sharded_param.device_mesh
        self.ranks = tuple(self._mesh.mesh.flatten().tolist())
        reduced = [group.mp_policy.reduce_dtype or group.mp_policy.param_dtype for group in groups]
        dtypes = [
            dtype or one.sharded_param.dtype for dtype, group in zip(reduced, groups, strict=True) for one in group.fsdp_params
        ]
        self.tolerance = 2.0**-5 if any(dtype.itemsize < 4 for dtype in dtypes) else 1e-4
        self.partial = False
        self._held: dict[str, nn.Parameter] = {}
        self._seen: set[int] = set()

    def parameters(self) -> dict[str, nn.Parameter]:
        # as they were between steps: during one the modules hold the gathered parameters in the place of these
        return self._held

    def root(self) -> nn.Module:
        return self._model

    def watch(self, came: Came, added: Added) -> list[Any]:
        self._seen = set()
        self._held = {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and name not in self._ignore
        }
        names = {id(parameter): name for name, parameter in self._held.items()}
        handles: list[Any] = []
        for name, parameter in self._held.items():
            if not isinstance(parameter, DTensor):
                handles.extend(told(parameter, name, came, added))

        def unsharded(state: Any) -> None:
            # the parameters that take part in the computation exist from the first all-gather on, which has just run
            for group in param_groups(state):
                for one in group.fsdp_params:
                    name = names.get(id(one.sharded_param))
                    whole = getattr(one, "_unsharded_param", None)
                    if name is not None and whole is not None and whole.requires_grad and id(whole) not in self._seen:
                        self._seen.add(id(whole))
                        handles.extend(told(whole, name, came, added))

        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                handles.append(module.register_forward_pre_hook(lambda *_, state=state: unsharded(state)))  # type: ignore[attr-defined]
        return handles

    def sharded(self, name: str) -> bool:
        return isinstance(self._held[name], DTensor)

    def replica(self, name: str) -> int:
        if not self.sharded(name):
            return dist.get_rank()
        return self._mesh.get_coordinate()[0] if self._mesh.ndim > 1 else 0

    def left(self, name: str) -> tuple[torch.Tensor, int] | None:
        parameter = self._held[name]
        gradient = parameter.grad
        if gradient is None or not isinstance(gradient, DTensor):
            return plain_gradient(parameter)
        if any(isinstance(each, Shard) and each.dim != 0 for each in gradient.placements):
            raise Unjudged
        _, offset = compute_local_shape_and_global_offset(gradient.shape, gradient.device_mesh, gradient.placements)
        row = gradient.numel() // max(gradient.shape[0], 1) if gradient.ndim else 1
        return gradient.to_local(), (offset[0] if offset else 0) * row

    def facts(self, came: Mapping[str, int]) -> Facts:
        names = {id(parameter): name for name, parameter in self._held.items()}
        groups = {
            names[id(one.sharded_param)]: {
                "sync": group.reduce_grads,
                "all": group.all_reduce_grads,
                "divide": group.gradient_divide_factor,
            }
            for group in self._groups()
            for one in group.fsdp_params
            if id(one.sharded_param) in names
        }
        return {"groups": groups, "came": dict(came)}

    def because(self, loss: Loss, facts: Mapping[int, Facts]) -> str:
        here = facts[loss.ranks[0]]
        group = here["groups"].get(loss.parameter)
        if group is None:
            return "it is a plain parameter beside those of fully_shard (added after it, or ignored by it): nothing reduces it"
        if loss.parameter not in here["came"]:
            return "its gradient did not come through backward (torch.autograd.grad?), which is where FSDP2 reduces"
        if not group["sync"]:
            return (
                "set_requires_gradient_sync(False) was on in the last backward: the gradient stays where no optimizer sees it"
            )
        if not group["all"]:
            return "set_requires_all_reduce(False) was on in the last backward: replicas keep their own mean"
        if group["divide"] is not None:
            return f"set_gradient_divide_factor({group['divide']:g}) divides by {group['divide']:g}, not by {len(self.ranks)}"
        return "FSDP2 reduced it through something else than a mean (a custom reduction?), or it was changed since"

    def _groups(self) -> list[Any]:
        return [
            group
            for module in self._model.modules()
            if isinstance(module, FSDPModule)
            for group in param_groups(module._get_fsdp_state())
        ]


def told(parameter: torch.Tensor, name: str, came: Came, added: Added) -> list[Any]:
    """Call `came` and `added` for the gradients of a parameter."""
    return [
        parameter.register_hook(lambda gradient: came(name, gradient)),
        parameter.register_post_accumulate_grad_hook(lambda _: added(name)),
    ]


def plain_gradient(parameter: nn.Parameter) -> tuple[torch.Tensor, int] | None:
    """The whole gradient of a parameter that is not sharded."""
    if parameter.grad is None:
        return None
    if parameter.grad.is_sparse:
        raise Unjudged
    return parameter.grad, 0


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 0.05 * other
