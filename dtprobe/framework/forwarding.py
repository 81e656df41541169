"""A process group that stands in front of another one, and can let it go.

Every reference that user code, DDP or torch's own tables hold is to the stand-in. The gloo back end keeps its threads and
sockets for as long as anything refers to its group or to one of its works (measured: 3 threads and 5 descriptors a group),
so the stand-in drops both when it ends.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtprobe.framework.errors import FrameworkError, GroupEnded

_NO_TIMEOUT = timedelta(0)


class ForwardedWork(dist.Work):
    """A collective in flight on a `ForwardingGroup`; lets the back end's own handle go once it has completed."""

    def __init__(self, inner: dist.Work, description: str, *, waits_once: bool = False) -> None:
        super().__init__()
        self._inner: dist.Work | None = inner
        self._description = description
        # gloo's sends and receives call themselves completed from the start, and a second wait blocks until the timeout
        self._waits_once = waits_once
        self._failed: BaseException | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """As `torch.distributed.Work.wait`; raises GroupEnded when the group ended before the work completed."""
        if self._inner is None:
            self._raise_if_failed()
            return True
        try:
            done = self._inner.wait(timeout) if timeout else self._inner.wait()
        except RuntimeError as error:
            # what is kept must not hold the frames of those who waited, nor they the work
            self._failed, self._inner = error.with_traceback(None), None
            raise
        if self._waits_once:
            self._inner = None
        self.let_go()
        return done

    def is_completed(self) -> bool:
        return self._inner is None or self._inner.is_completed()

    def is_success(self) -> bool:
        return self._failed is None if self._inner is None else self._inner.is_success()

    def exception(self) -> Any:
        return self._failed if self._inner is None else self._inner.exception()

    def synchronize(self) -> None:
        if self._inner is not None:
            self._inner.synchronize()

    def block_current_stream(self) -> None:
        if self._inner is not None:
            self._inner.block_current_stream()

    def source_rank(self) -> int:
        return self._reached().source_rank()

    def _source_rank(self) -> int:
        return self.source_rank()

    def result(self) -> list[torch.Tensor]:
        return self._reached().result()

    def get_future(self) -> torch.futures.Future:
        """The future of the back end; ask before `wait`: a completed work has let it go."""
        return self._reached().get_future()

    def let_go(self, *, ended: bool = False) -> None:
        """Drop the back end's handle if it has completed, or in any case when the group has `ended`."""
        if self._inner is None:
            return
        if self._inner.is_completed() and not self._waits_once:
            try:
                self._inner.wait()
            except RuntimeError as error:
                self._failed = self._ended(f" ({_first_line(error)})") if ended else error.with_traceback(None)
            self._inner = None
        elif ended:
            self._inner, self._failed = None, self._ended()

    def _ended(self, why: str = "") -> GroupEnded:
        return GroupEnded(f"{self._description}: the group ended before it completed{why}", "wait() first")

    def _reached(self) -> dist.Work:
        if self._inner is None:
            self._raise_if_failed()
            raise FrameworkError(f"{self._description} has completed and let its result go", "ask before wait()")
        return self._inner

    def _raise_if_failed(self) -> None:
        if self._failed is not None:
            raise self._failed


class ForwardingGroup(dist.ProcessGroup):
    """A `torch.distributed.ProcessGroup` that passes every call to another group until `let_go`.

    Subclasses override `before` to look at a collective first. DDP, FSDP2, DeviceMesh and functional collectives accept it.
    """

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # its stub knows one of two constructors
        self._inner: dist.ProcessGroup | None = inner
        self._works: weakref.WeakSet[ForwardedWork] = weakref.WeakSet()
        self._known_name = inner.group_name
        self._known_desc = inner.group_desc
        self._gloo = inner.name().endswith("gloo")
        # DDP's logger asks a group that calls itself "gloo" or "nccl" for a C++ back end, which a stand-in does not have
        self._known_backend = f"dtprobe:{inner.name()}"

    @property
    def inner(self) -> dist.ProcessGroup:
        """The group behind; raises GroupEnded after `let_go`. Do not keep it: it holds the back end's threads."""
        if self._inner is None:
            raise GroupEnded(f"group {self._known_desc!r} ({self._known_name}) has ended", "create it again")
        return self._inner

    @property
    def ended(self) -> bool:
        return self._inner is None

    @property
    def busy(self) -> bool:
        """Whether a collective whose work someone still holds has not completed."""
        return any(
            not work.is_completed() for work in list(self._works)
        )  # gloo's point-to-point always says yes, and blocks no end

    def before(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before each collective is passed on, with the method's name and arguments. Raise to refuse it."""

    def let_go(self) -> None:
        """Drop the group behind and all works in flight: their threads and descriptors go when nothing else refers to them."""
        for work in list(self._works):
            work.let_go(ended=True)
        self._works.clear()
        self._inner = None

    # what torch asks of a group beside collectives

    @property
    def group_name(self) -> Any:
        return self._known_name

    @property
    def group_desc(self) -> str:
        return self._known_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return self.inner._device_types

    @property  # type: ignore[misc]  # read only here: a stand-in is bound to what it stands for
    def bound_device_id(self) -> torch.device | None:
        return self.inner.bound_device_id

    def getBackendName(self) -> str:
        return self._known_backend

    def getGroupName(self) -> str:
        return self._known_name

    def getGroupDesc(self) -> str:
        return self._known_desc

    def shutdown(self) -> None:
        if self._inner is not None:
            self._inner.shutdown()

    def abort(self) -> None:
        if self._inner is not None:
            self._inner.abort()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]


def _forwarded(name: str) -> Any:
    def method(self: ForwardingGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _collective(name: str) -> Any:
    def method(self: ForwardingGroup, *args: Any, **kwargs: Any) -> ForwardedWork:
        self.before(name, args, kwargs)
        inner = getattr(self.inner, name)(*args, **kwargs)
        waits_once = name in _POINT_TO_POINT and self._gloo
        work = ForwardedWork(inner, f"{name} on group {self._known_desc!r}", waits_once=waits_once)
        del inner
        self._works.add(work)
        return work

    method.__name__ = name
    return method


COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
)
"""Methods of `ProcessGroup` that are collectives; torch has renamed some, and which exist depends on its version."""

_POINT_TO_POINT = ("send", "recv", "recv_anysource", "_end_coalescing")
_PLAIN = (
    "_start_coalescing",
    "monitored_barrier",
    "_get_backend",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
    "_enable_collectives_timing",
    "get_group_store",
    "set_timeout",
    "split_group",
    "use_pg_for_symm_mem_rendezvous",
)

for _name in (*COLLECTIVES, *_POINT_TO_POINT):
    if hasattr(dist.ProcessGroup, _name):
        setattr(ForwardingGroup, _name, _collective(_name))
for _name in _PLAIN:
    if hasattr(dist.ProcessGroup, _name):
        setattr(ForwardingGroup, _name, _forwarded(_name))


def stand_in(outer: dist.ProcessGroup, inner: dist.ProcessGroup) -> None:
    """Put `outer` in `inner`'s place in torch's tables: by handle, by name, by tag, and as the default group.

    torch has no public call for it; these are the tables that `destroy_process_group` clears (torch 2.9 to 2.13).
    """
    world = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        table[outer] = table.pop(inner)  # type: ignore[assignment]
    for groups in world.tags_to_pg.values():
        groups[:] = [outer if group is inner else group for group in groups]
    c10d._unregister_process_group(inner.group_name)
    c10d._register_process_group(inner.group_name, outer)
    if c10d.GroupMember.WORLD is inner:
        c10d._update_default_pg(outer)
