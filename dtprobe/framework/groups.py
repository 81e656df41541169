"""Groups made in one agreed order, verified across ranks, and really ended.

`torch.distributed.new_group` trusts its callers: groups of equal membership made in another order on one rank swap silently
(sums 201 and 102 instead of 3 and 300), the timeout of the default group is not passed on (30 minutes beside 6 s), and a
destroyed gloo group keeps its threads while anything refers to it. Here each creation is agreed on first, every rank gets a
typed error when one differs or does not come, and `end` gives threads and descriptors back whoever still holds a handle.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtprobe.errors import Unavailable, UsageError
from dtprobe.framework.agreement import Agreement, Said, difference, named
from dtprobe.framework.errors import FrameworkError, GroupFailed, GroupMismatch
from dtprobe.framework.forwarding import ForwardingGroup, stand_in
from dtprobe.framework.part import torch_distributed
from dtprobe.framework.wires import Opened, Wires, watch

_GRACE_S = 0.25
_FIELDS = ("name", "ranks", "backend", "timeout_s", "made_before")


def probe() -> Unavailable | None:
    """None where torch.distributed was built in."""
    return torch_distributed()


class ScopedGroup(ForwardingGroup):
    """A process group whose `end` releases the back end even while user code, DDP or an exception still refers to it.

    `label` is the name it was made under, `members` the global ranks in group order. After `end` each use raises GroupEnded.
    """

    def __init__(
        self, inner: dist.ProcessGroup, *, label: str, members: tuple[int, ...], threads: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(inner)
        self.label = label
        self.members = members
        self._threads = threads
        self._wires = Wires({})

    def connected(self, wires: Wires) -> None:
        """Tell the group which connections are its own, so that `abort` can cut them."""
        self._wires = wires

    def abort(self) -> None:
        """Make everything in flight on this group fail now, on this rank and its peers; may be called from any thread.

        The way out of a collective whose peer never comes: torch's gloo would block until its timeout. The group is of no
        use afterwards; `end` it.
        """
        super().abort()
        self._wires.cut()

    def end(self) -> None:
        """End the group on this rank: unregister it, shut the back end down, drop it and its works. Safe to call twice.

        Local: it does not wait for other ranks, nor for works that have not completed; those fail with GroupEnded.
        """
        if self.ended:
            return
        # A collective that only needs a moment gets it: gloo can miss a connection that is cut in the middle of a send, and wait
        # for its timeout after all (seen in 1 of 30 ends without it).
        deadline = time.monotonic() + _GRACE_S
        while self.busy and time.monotonic() < deadline:
            time.sleep(0.002)
        if self.busy:
            self.abort()
        registered = _registered(self)
        if registered is not None:
            dist.destroy_process_group(registered)
        self.let_go()

    def leftover(self) -> int:
        """Threads of this group that are still alive: 0 after `end`, unless someone kept `inner` or `_get_backend()`."""
        return len(self._threads & _thread_ids())


class Groups:
    """The groups of one job, by name. Make one on every rank after `init_process_group`, and use it as a context manager.

    `timeout_s` bounds each creation and is the default timeout of the collectives on every group made here (seconds).
    """

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        if not dist.is_initialized():
            raise UsageError("no default process group", "call dtprobe.framework.bootstrap.start or init_process_group first")
        self._timeout_s = timeout_s
        self._members = tuple(range(dist.get_world_size()))
        store = c10d._get_default_store()
        self._agreement = Agreement(
            store, rank=dist.get_rank(), members=self._members, prefix=f"dtprobe.groups/{_registries()}"
        )
        self._groups: dict[str, ScopedGroup | None] = {}

    def create(
        self, name: str, ranks: Sequence[int] | None = None, *, timeout_s: float | None = None, backend: str | None = None
    ) -> ScopedGroup | None:
        """Make the group `name` of the global `ranks` (default: all) on every rank of the job, in the same order everywhere.

        Returns the group, or None on a rank that is not a member. Raises GroupMismatch, naming the ranks that differ, when
        name, ranks, backend, timeout or the number of groups made so far are not the same on all ranks; MissingRanks when
        some rank does not come within `timeout_s`; GroupFailed naming the ranks on which the back end could not make it. In
        none of these cases does the group exist anywhere afterwards.
        """
        if name in self._groups:
            raise UsageError(
                f"group {name!r} exists already with ranks {self._ranks(name)}", "end it first, or choose another name"
            )
        wanted = self._members if ranks is None else tuple(ranks)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        self._validate(name, wanted)
        self._agree(name, wanted, limit_s, backend)
        group, failure = None, ""
        try:
            group, opened = self._make(name, wanted, limit_s, backend)
        except (RuntimeError, ValueError) as error:
            opened, failure = Opened(), str(error).strip().partition("\n")[0][:300]
        said = {"ports": opened.ports, "failure": failure}
        verdict = self._agreement.reach(said, made, limit_s, what=f"making of group {name!r}")
        if "wrong" in verdict:
            if group is not None:
                group.end()
            raise GroupFailed(f"group {name!r} could not be made: {verdict['wrong']}", ranks=verdict["ranks"])
        if group is not None:
            group.connected(Wires.among(opened, verdict["ports"]))
        self._groups[name] = group
        return group

    def _make(
        self, name: str, wanted: tuple[int, ...], timeout_s: float, backend: str | None
    ) -> tuple[ScopedGroup | None, Opened]:
        before = _thread_ids()
        with watch() as opened:
            native = dist.new_group(list(wanted), timeout=timedelta(seconds=timeout_s), backend=backend, group_desc=name)
        if dist.get_rank() not in wanted:
            return None, opened
        group = ScopedGroup(native, label=name, members=wanted, threads=_thread_ids() - before)
        stand_in(group, native)
        return group, opened

    def create_all(
        self, wanted: Mapping[str, Sequence[int]], *, timeout_s: float | None = None
    ) -> dict[str, ScopedGroup | None]:
        """Make several groups in the order of their names, whatever the order of the mapping on each rank."""
        return {name: self.create(name, wanted[name], timeout_s=timeout_s) for name in sorted(wanted)}

    def __getitem__(self, name: str) -> ScopedGroup:
        """The group of that name; raises UsageError when there is none or this rank is not a member."""
        group = self._groups.get(name)
        if group is None:
            why = "this rank is not a member" if name in self._groups else f"there are {', '.join(self._groups) or 'none'}"
            raise UsageError(f"no group {name!r} on this rank", why)
        return group

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def end(self, name: str | None = None) -> None:
        """End the group `name`, or all of them, last made first. Local to this rank; see `ScopedGroup.end`."""
        for each in [name] if name is not None else list(reversed(self._groups)):
            group = self._groups.pop(each, None)
            if group is not None:
                group.end()

    def close(self) -> None:
        """End all groups and let the registry's own connection to the store go."""
        self.end()
        self._agreement.close()

    @contextlib.contextmanager
    def scope(self, name: str, ranks: Sequence[int] | None = None, **options: Any) -> Iterator[ScopedGroup | None]:
        """`create` for the length of a `with` block, ended also when the block raises."""
        group = self.create(name, ranks, **options)
        try:
            yield group
        finally:
            self.end(name)

    def __enter__(self) -> Groups:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ranks(self, name: str) -> list[int]:
        group = self._groups[name]
        return list(group.members) if group is not None else []

    def _validate(self, name: str, wanted: tuple[int, ...]) -> None:
        outside = [rank for rank in wanted if rank not in self._members]
        if not wanted or outside or len(set(wanted)) != len(wanted):
            raise UsageError(
                f"group {name!r} asks for ranks {list(wanted)} of a world of {len(self._members)}",
                "name each existing rank once",
            )

    def _agree(self, name: str, wanted: tuple[int, ...], timeout_s: float, backend: str | None) -> None:
        said = {
            "name": name,
            "ranks": list(wanted),
            "backend": backend or dist.get_backend(),
            "timeout_s": timeout_s,
            # torch derives the name under which ranks meet from this counter: ranks that differ never find each other
            "made_before": c10d._world.group_count,
        }
        verdict = self._agreement.reach(said, _judge, timeout_s, what=f"creation of group {name!r}")
        if verdict:
            raise GroupMismatch(
                verdict["wrong"], "create the same groups in the same order on every rank", ranks=verdict["ranks"]
            )


def scoped_world() -> ScopedGroup:
    """Put a ScopedGroup in the default group's place, so that its `end` really ends it; call it before DDP or a mesh is built."""
    world = c10d._get_default_group()
    if isinstance(world, ScopedGroup):
        return world
    group = ScopedGroup(world, label="world", members=tuple(range(world.size())))
    stand_in(group, world)
    return group


def _judge(heard: Mapping[int, list[Said]]) -> Said:
    twice = [rank for rank, said in heard.items() if len(said) > 1]
    if twice:
        return {"ranks": twice, "wrong": f"two processes claim to be {named(twice)}"}
    found = difference({rank: said[0] for rank, said in heard.items()}, _FIELDS)
    if found is None:
        return {}
    shown = "; ".join(
        f"{field}: " + ", ".join(f"rank {rank} {value}" for rank, value in sorted(values.items()))
        for field, values in found.fields.items()
    )
    blamed = f"{named(found.ranks)} differ" if found.decided else "no majority decides who is wrong"
    return {"ranks": list(found.ranks), "wrong": f"ranks create different groups ({blamed}): {shown}"}


def made(heard: Mapping[int, list[Said]]) -> Said:
    """Which ranks could not make the group, and at which ports those that did are reached."""
    failed = {rank: said[0]["failure"] for rank, said in heard.items() if said[0]["failure"]}
    if failed:
        return {"ranks": sorted(failed), "wrong": "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items()))}
    return {"ports": [port for said in heard.values() for port in said[0]["ports"]]}


def _registered(group: ForwardingGroup) -> dist.ProcessGroup | None:
    """The handle under which torch knows this group: itself, or what stands in front of it."""
    for known in list(c10d._world.pg_map):
        front: Any = known
        while isinstance(front, ForwardingGroup) and front is not group:
            front = front._inner
        if front is group:
            return known
    return None


_count = 0
_making = threading.Lock()


def _registries() -> int:
    """How many registries this process made before: each has keys of its own in the store."""
    global _count  # noqa: PLW0603
    with _making:
        _count += 1
        return _count - 1


def _thread_ids() -> frozenset[int]:
    try:
        return frozenset(int(entry.name) for entry in Path("/proc/self/task").iterdir())
    except OSError as error:
        raise FrameworkError(f"cannot read /proc/self/task: {error}", "mount /proc") from None
