"""The ordered start of a job: store, identities, default group, registry, each in its turn and before one deadline."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtprobe.framework.agreement import Agreement
from dtprobe.framework.bootstrap.deputy import Deputy
from dtprobe.framework.bootstrap.identity import Peer, completed, verify
from dtprobe.framework.bootstrap.placement import Placement, resolve
from dtprobe.framework.checked import checked
from dtprobe.framework.errors import FrameworkError, RankError, StoreLost
from dtprobe.framework.groups import Groups, ScopedGroup, made, scoped_world
from dtprobe.framework.stores import SafeFileStore, meet
from dtprobe.framework.wires import Opened, Wires, watch

_ACK_S = 5.0
_GRACE_S = 2.0

_starts: Counter[tuple[str, int]] = Counter()
"""How often this process started a job of a run and attempt: each has keys of its own, the last one's may still be there."""


class StartFailed(RankError):
    """Store and identities were fine, but the default group could not be made; `ranks` are those on which it failed."""


class Job:
    """A started job on this rank. Use as a context manager: leaving it ends groups, default group and store in that order.

    `placement` is complete (no None but the port), `peers` are all ranks in order, `world` is the default group, `groups`
    the registry for others, `store` a store of this attempt alone.
    """

    def __init__(
        self,
        placement: Placement,
        peers: tuple[Peer, ...],
        world: ScopedGroup,
        groups: Groups,
        store: Any,
        stack: contextlib.ExitStack,
    ) -> None:
        self.placement = placement
        self.peers = peers
        self.world = world
        self.groups = groups
        self.store = store
        self._stack = stack

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.store = None
        self._stack.__exit__(kind, error, trace)

    def end(self) -> None:
        """Agree with the other ranks that the work is done, then end everything that `start` began.

        Raises MissingRanks naming ranks that do not come to the end; everything on this rank is ended in that case too.
        """
        self.__exit__(None, None, None)


def start(
    placement: Placement | None = None,
    *,
    backend: str = "gloo",
    deadline_s: float = 60.0,
    timeout_s: float = 600.0,
    checked_for: int = 0,
    folder: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Job:
    """Bring this rank into its job: store, then identities, then the default group and a registry of groups.

    `placement` defaults to what the launcher's environment says. All of it takes at most `deadline_s` seconds; `timeout_s` is
    the timeout of collectives afterwards. The first `checked_for` collectives on the default group are compared across
    ranks (see `dtprobe.framework.checked`). With `folder`, on a file system that all hosts share, a SafeFileStore is used and no port.

    Raises PlacementError, PortTaken, StaleStore, MissingRanks (naming ranks), IdentityError, StoreLost or StartFailed; whatever was
    begun is undone then. A rank that is stuck in NCCL's initialisation when another fails, or at the deadline, says so on stderr and
    ends with code 1 (see `deputy`).
    """
    where = placement if placement is not None else resolve(os.environ)
    try:
        return _start(where, backend, deadline_s, timeout_s, checked_for, folder, clock)
    except FrameworkError as error:
        raise error.detached() from None


def _start(
    where: Placement,
    backend: str,
    deadline_s: float,
    timeout_s: float,
    checked_for: int,
    folder: Path | None,
    clock: Callable[[], float],
) -> Job:
    # rank 0 stays up to a second longer than the others when the start fails, so that they can read why
    deadline = clock() + deadline_s - min(1.0, deadline_s / 5)

    def left() -> float:
        return max(deadline - clock(), 0.05)

    with contextlib.ExitStack() as undo:
        again = _starts[where.run, where.attempt]
        _starts[where.run, where.attempt] += 1
        raw = _store(where, folder, left(), again, undo)
        store = dist.PrefixStore(f"dtprobe/{where.run}/{where.attempt}/{again}", raw)
        peers = verify(where, store, timeout_s=left())
        where = completed(where, peers)
        agreement = Agreement(store, rank=where.rank, members=tuple(range(where.world_size)), prefix="dtprobe.start")
        undo.callback(agreement.close)
        undo.callback(_end_world)
        # gloo waits up to five times its timeout for a mesh that does not close, so it gets a share of what is left
        limit_s = left() / 6
        deputy = Deputy(
            store,
            speak=lambda why: _agree_on_success(agreement, why, Opened(), backend, left()),
            left=left,
            grace_s=_GRACE_S + (0 if backend == "nccl" else limit_s),  # NCCL knows no timeout here
        )
        # gloo comes back by itself, if late
        with watch() as opened, contextlib.nullcontext() if backend == "gloo" else deputy.on_duty():
            failure = _default_group(where, peers, backend, store, limit_s)
        if failure:
            deputy.failed()
        ports = _agree_on_success(agreement, failure, opened, backend, left())
        world = scoped_world()
        world.connected(Wires.among(opened, ports))
        _set_timeout(world, timedelta(seconds=timeout_s))
        groups = Groups(timeout_s=timeout_s)
        undo.callback(groups.close)
        undo.push(_Goodbye(agreement, where, store, deadline_s))
        if checked_for:
            undo.enter_context(checked(timeout_s=min(timeout_s, 30.0), limit=checked_for))
        return Job(where, peers, world, groups, store, undo.pop_all())
    raise AssertionError("unreachable: the stack swallows nothing")


def _store(where: Placement, folder: Path | None, timeout_s: float, again: int, undo: contextlib.ExitStack) -> Any:
    if folder is None:
        return meet(where, timeout_s=timeout_s, again=again)
    run = re.sub(r"[^A-Za-z0-9_.-]", "_", where.run or "run")[:90] + (f".{again}" if again else "")
    store = SafeFileStore(
        folder, run=run, attempt=where.attempt, rank=where.rank, world_size=where.world_size, timeout_s=timeout_s
    )
    undo.enter_context(store)
    return store


def _default_group(where: Placement, peers: tuple[Peer, ...], backend: str, store: Any, limit_s: float) -> str:
    """Make the default group and see that it connects the processes that the store introduced; why not, or nothing."""
    try:
        limit = timedelta(seconds=limit_s)
        dist.init_process_group(backend, store=store, rank=where.rank, world_size=where.world_size, timeout=limit)
        mine = torch.tensor([where.rank, os.getpid()], device="cuda" if backend == "nccl" else "cpu")
        found = [torch.empty_like(mine) for _ in peers]
        dist.all_gather(found, mine)
    except (RuntimeError, ValueError) as error:
        return str(error).strip().partition("\n")[0][:300] or type(error).__name__
    strangers = [peer.rank for peer, each in zip(peers, found, strict=True) if each.tolist() != [peer.rank, peer.pid]]
    return f"other processes than those introduced answer as ranks {strangers}" if strangers else ""


def _agree_on_success(agreement: Agreement, failure: str, opened: Opened, backend: str, timeout_s: float) -> list[int]:
    """Every rank made the group, or all raise: StartFailed naming those that failed, MissingRanks those that died in it.

    The ports at which its members listen.
    """
    verdict = agreement.reach({"ports": opened.ports, "failure": failure}, made, timeout_s, what="making the default group")
    if "wrong" in verdict:
        raise StartFailed(f"the default group ({backend}) could not be made: {verdict['wrong']}", ranks=verdict["ranks"])
    return list(verdict["ports"])


def _set_timeout(world: ScopedGroup, timeout: timedelta) -> None:
    """torch's own call reaches only its C++ back ends; a group written in Python has a method for it."""
    if type(world.inner) is dist.ProcessGroup:
        c10d._set_pg_timeout(timeout, world)
    else:
        world.inner.set_timeout(timeout)


def _end_world() -> None:
    if dist.is_initialized():
        world = c10d._get_default_group()
        if isinstance(world, ScopedGroup):
            world.end()
        else:
            dist.destroy_process_group()


class _Goodbye:
    """Leaving the job: agree that all are done, and let the rank that serves the store go last."""

    def __init__(self, agreement: Agreement, where: Placement, store: Any, timeout_s: float) -> None:
        self._agreement, self._where, self._store, self._timeout_s = agreement, where, store, timeout_s

    def __call__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._agreement.leave(f"{type(error).__name__}: {error}"[:500])
            return
        self._agreement.reach({}, lambda heard: {}, self._timeout_s, what="end of the job")
        self._acknowledge()

    def _acknowledge(self) -> None:
        try:
            gone = self._store.add("dtprobe.gone", 1)
            if self._where.rank == 0 and gone < self._where.world_size:
                self._wait_for_the_others()
            elif gone == self._where.world_size:
                self._store.set("dtprobe.all-gone", "")
        except dist.DistNetworkError as error:
            raise StoreLost(f"end of the job: the store went before rank {self._where.rank} was done ({error})") from None

    def _wait_for_the_others(self) -> None:
        try:
            self._store.wait(["dtprobe.all-gone"], timedelta(seconds=_ACK_S))
        except dist.DistStoreError:
            raise FrameworkError(f"end of the job: some rank agreed to end and then vanished within {_ACK_S:g} s") from None
