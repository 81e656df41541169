"""A process group that one part has for itself, so that nothing else can pair with its messages, and that names who did not come.

A decision that shares a group with the gradients of a model is taken for one of them as soon as one rank is a call behind:
gloo adds up whatever arrives.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtprobe.errors import UsageError
from dtprobe.framework.agreement import Agreement, named
from dtprobe.framework.errors import FrameworkError, MissingRanks, StoreLost

_NAMING_S = 5.0
_made = itertools.count()
"""Own groups of this process: every rank of the job makes the same ones, and each has keys of its own in the store."""


class OwnGroup:
    """A new group over the global `ranks` (default: the world). Every rank of the job makes one at the same point.

    Ranks may ask for different groups (each stage of a pipeline for its replicas): all of them are made in one order.
    `label` names it in messages; `timeout_s` (seconds) bounds each exchange. Where a collective fails, the ranks that are
    there find out over the store which are not, and all of them raise MissingRanks. `close` ends the group.
    """

    def __init__(self, ranks: Sequence[int] | None, *, label: str, timeout_s: float) -> None:
        if not dist.is_initialized():
            raise UsageError("no default process group", "call dtprobe.framework.bootstrap.start or init_process_group first")
        self.ranks = tuple(ranks if ranks is not None else range(dist.get_world_size()))
        self._label = label
        self._timeout_s = timeout_s
        self._done = 0
        self._group: dist.ProcessGroup | None = None
        self._name = f"{label}/{next(_made)}"
        # not with use_local_synchronization: that gives a group the name, and so the stale addresses, of one of the same ranks
        # that has been destroyed (connection refused, seen with torch 2.13)
        for wanted in self._wanted():
            made = dist.new_group(list(wanted), timeout=timedelta(seconds=timeout_s), group_desc=label)
            self._group = made if wanted == self.ranks else self._group

    def _wanted(self) -> list[tuple[int, ...]]:
        """The groups that the ranks of the job ask for, in the order in which all of them make them."""
        store = c10d._get_default_store()
        keys = [f"dtprobe.precision/{self._name}/{rank}" for rank in range(dist.get_world_size())]
        try:
            store.set(keys[dist.get_rank()], json.dumps(self.ranks))
            try:
                store.wait(keys, timedelta(seconds=self._timeout_s))
            except dist.DistStoreError:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise MissingRanks(
                    f"{named(missing)} did not make its {self._label} within {self._timeout_s:.3g} s",
                    "make it on every rank of the job, at the same point",
                    ranks=missing,
                ) from None
            return sorted({tuple(json.loads(store.get(key))) for key in keys})
        except dist.DistNetworkError as error:
            first = str(error).partition("\n")[0][:200]
            raise StoreLost(f"making of the {self._label}: the store stopped answering ({first})", "see rank 0") from None

    def maximum(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """The elementwise maximum of `values` over the ranks, in place; every rank passes the same shape and dtype."""
        try:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._open)
        except RuntimeError as error:
            self._raise_missing(what, error)
        self._done += 1
        return values

    def gathered(self, value: Any, what: str) -> dict[int, Any]:
        """Global rank -> what that rank passed (any picklable object of this same job)."""
        found: list[Any] = [None] * len(self.ranks)
        try:
            dist.all_gather_object(found, value, group=self._open)
        except RuntimeError as error:
            self._raise_missing(what, error)
        self._done += 1
        return dict(zip(self.ranks, found, strict=True))

    def close(self) -> None:
        """End the group on this rank. Safe to call twice, and after `destroy_process_group`."""
        group, self._group = self._group, None
        if group is not None and group in c10d._world.pg_map:
            dist.destroy_process_group(group)

    @property
    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise FrameworkError(f"the group of {self._label} was closed", "make a new one")
        return self._group

    def _raise_missing(self, what: str, error: RuntimeError) -> None:
        agreement = Agreement(
            c10d._get_default_store(),
            rank=dist.get_rank(),
            members=self.ranks,
            prefix=f"dtprobe.precision/{self._name}/{self._done}",
        )
        try:
            agreement.reach({}, lambda heard: {}, min(self._timeout_s, _NAMING_S), what=what)
        finally:
            agreement.close()
        first = str(error).strip().partition("\n")[0][:200]
        raise FrameworkError(f"{what} failed although every rank is there: {first}", "see the network between them") from error
