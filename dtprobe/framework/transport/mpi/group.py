"""torch's ProcessGroup over MPI: its name and life, point-to-point, sub-groups, and how an operation is issued."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from dtprobe.framework.agreement import Agreement, Said, named
from dtprobe.framework.errors import FrameworkError, GroupEnded, GroupFailed
from dtprobe.framework.transport.mpi import NAME
from dtprobe.framework.transport.mpi import tensors as t
from dtprobe.framework.transport.mpi.collectives import Collectives, listed
from dtprobe.framework.transport.mpi.engine import Engine
from dtprobe.framework.transport.mpi.errors import RankDisagreement, Unsupported
from dtprobe.framework.transport.mpi.exchange import Exchange
from dtprobe.framework.transport.mpi.operation import Channel, Operation
from dtprobe.framework.transport.mpi.parts import Tensors
from dtprobe.framework.transport.mpi.receive import Mailbox, Receive
from dtprobe.framework.transport.mpi.work import JoinedWork, MpiWork

REMEDY = "start every rank with mpirun, and take rank and world size from MPI (register() sets RANK and WORLD_SIZE)"

_TAGS = 2**15 - 2
"""MPI grants tags up to 2**15 - 1; sums so far apart are never under way together."""


class MpiGroup(Collectives):
    """A process group whose members are ranks of MPI's world; made by torch through `register`, not by hand."""

    def __init__(self, engine: Engine, channel: Channel, store: Any, rank: int, timeout: timedelta) -> None:
        super().__init__(rank, len(channel.members))  # type: ignore[call-arg]  # its stub knows one of two constructors
        self._engine = engine
        self._channel = channel
        self._store = store
        self._timeout_s = timeout.total_seconds()
        self._known_name = channel.name
        self._known_desc = channel.shown
        self._order = threading.Lock()
        self._batch: list[MpiWork] | None = None
        self._ended = False
        self._sums = 0
        self._splits_made: Counter[tuple[int, ...]] = Counter()

    # what torch asks of a group beside collectives

    @property
    def group_name(self) -> Any:
        return self._known_name

    def _set_group_name(self, name: Any) -> None:
        self._known_name = name

    @property
    def group_desc(self) -> str:
        return self._known_desc

    def _set_group_desc(self, desc: str) -> None:
        self._known_desc = desc
        if desc != "undefined":  # what torch calls a group to which the user gave no description
            self._channel.shown = desc

    def getGroupName(self) -> str:
        return self._known_name

    def getGroupDesc(self) -> str:
        return self._known_desc

    def getBackendName(self) -> str:
        return NAME

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """The timeout of operations from now on that name none."""
        self._timeout_s = timeout.total_seconds()

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def _set_sequence_number_for_group(self) -> None:
        """MPI numbers operations itself."""

    def _get_sequence_number_for_group(self) -> int:
        return self._channel.issued

    @property
    def failure(self) -> FrameworkError | None:
        """Why no operation can be issued any more, or None."""
        return self._channel.failure

    def shutdown(self) -> None:
        """End the group: operations in flight complete first, or end by their timeout; then MPI lets its communicator go."""
        if self._ended:
            return
        self._ended = True
        self._engine.retire(self._channel)

    def abort(self) -> None:
        """End the group at once; operations in flight raise GroupEnded here and PeerLost on the other members."""
        self._ended = True
        failure = GroupEnded(f"group {self._channel.shown!r} was aborted by rank {self._engine.rank}")
        self._engine.post(lambda: self._engine.break_channel(self._channel, failure))

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> MpiGroup | None:
        """A group of the ranks `new_ranks` of this one, None on a rank that is not among them; all members call it.

        (`dist.split_group` itself asks for a group that is bound to an accelerator and does not get here on hosts' memory.)
        """
        if self.rank() not in new_ranks:
            return None
        members = tuple(self._world(rank) for rank in new_ranks)
        name = group_name or f"{self._known_name}/{'-'.join(map(str, members))}"
        limit = timeout or timedelta(seconds=self._timeout_s)
        store = dist.PrefixStore(f"{name}/{self._splits_made[members]}", self._store)
        self._splits_made[members] += 1
        made = make_group(self._engine, name, members, new_ranks.index(self.rank()), store, limit)
        if group_desc is not None:
            made._set_group_desc(group_desc)
        return made

    # point to point

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> MpiWork:
        (tensor,) = listed(tensors)
        t.check("send", tensor)
        flat = t.moved(tensor)

        def start() -> list[MPI.Request]:
            return [self._comm.Isend(t.spec(flat.memory), dstRank, tag)]

        return self._issue(f"send to rank {self._world(dstRank)} with tag {tag}", [tensor], None, start, lambda: None, dstRank)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> MpiWork:
        return self._receive(f"recv from rank {self._world(srcRank)} with tag {tag}", tensors, srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> MpiWork:
        return self._receive(f"recv from any rank with tag {tag}", tensors, None, tag)

    def _receive(self, what: str, tensors: Any, source: int | None, tag: int) -> MpiWork:
        (tensor,) = listed(tensors)
        t.check("recv", tensor)
        flat = t.moved(tensor, read=False)
        taken: list[Receive] = []

        def start() -> list[Any]:
            box: Mailbox = self._channel.box
            taken.append(box.receive(flat.memory, MPI.ANY_SOURCE if source is None else source, tag))
            return list(taken)

        def finish() -> int:
            if not taken[0].fits:
                raise Unsupported(
                    f"{what}: {taken[0].came} elements came, {flat.memory.numel()} were expected", "receive what is sent"
                )
            flat.deliver()
            return taken[0].source

        return self._issue(what, [tensor], None, start, finish, source)

    def _world(self, rank: int) -> int:
        return self._channel.members[rank]

    # coalescing: operations start at once, the end joins their works

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> MpiWork:
        works, self._batch = self._batch or [], None
        return JoinedWork("coalesced operations", works)

    # how an operation is issued

    @property
    def _comm(self) -> MPI.Intracomm:
        return self._channel.comm

    def _sum(self, memory: torch.Tensor, how: t.Reduction) -> Exchange:
        self._sums += 1
        first = 2 * self._sums % _TAGS
        return Exchange(self._channel.beside, memory, how, (first, first + 1))

    def _collective(
        self,
        what: str,
        outputs: Tensors,
        opts: Any,
        start: Callable[[], list[MPI.Request]],
        finish: Callable[[], None],
        then: Callable[[], list[MPI.Request]] | None = None,
    ) -> MpiWork:
        return self._issue(what, outputs, opts, start, finish, None, then)

    def _issue(
        self,
        what: str,
        outputs: Tensors,
        opts: Any,
        start: Callable[[], list[MPI.Request]],
        finish: Callable[[], int | None],
        peer: int | None,
        then: Callable[[], list[MPI.Request]] | None = None,
    ) -> MpiWork:
        """`opts` is None for point-to-point, with `peer` as its other side, where there is one."""
        if self._ended:
            raise GroupEnded(f"{what}: group {self._channel.shown!r} has ended", "create it again")
        if self._channel.failure is not None:
            raise self._channel.failure
        asked = opts.timeout.total_seconds() if opts is not None else 0.0
        timeout_s = asked if asked > 0 else self._timeout_s  # torch writes "not set" as a negative time
        deadline = self._engine.clock() + timeout_s
        others = [rank for rank in self._channel.members if rank != self._engine.rank]
        shown = f"{what} on group {self._channel.shown!r}" + (f" ({_sizes(outputs)})" if outputs else "")
        work = MpiWork(shown, list(outputs), lambda: deadline - self._engine.clock())
        with self._order:
            number = None
            if opts is not None:
                self._channel.issued += 1
                number = self._channel.issued
            self._channel.doing = what
            self._engine.issue(
                Operation(
                    what=shown,
                    channel=self._channel,
                    start=start,
                    work=work,
                    deadline=deadline,
                    timeout_s=timeout_s,
                    number=number,
                    needs=tuple(others if peer is None else [self._world(peer)]),
                    finish=finish,
                    then=then,
                )
            )
        if self._batch is not None:
            self._batch.append(work)
        return work


def make_group(engine: Engine, name: str, members: tuple[int, ...], rank: int, store: Any, timeout: timedelta) -> MpiGroup:
    """A group of the global ranks `members`, of which this is number `rank`; called by each of them.

    All members agree first, over the store, so that a missing or mistaken rank is named in time: creation of a communicator
    in MPI has no timeout. Raises MissingRanks, RankDisagreement or GroupFailed.
    """
    timeout_s = timeout.total_seconds()
    channel = Channel(name=name, shown=name, members=members)
    _meet(engine, channel, rank, store, timeout_s)

    def make() -> Any:
        comm = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(members))
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        engine.channels[name] = channel
        return comm, comm.Dup()

    try:
        comm, beside = engine.call(f"creation of group {name!r}", make, timeout_s)
    except MPI.Exception as error:
        raise GroupFailed(f"MPI could not make group {name!r}: {error.Get_error_string()}", ranks=members) from None
    channel.comm, channel.box, channel.beside = comm, Mailbox(comm), Mailbox(beside)
    return MpiGroup(engine, channel, store, rank, timeout)


def _meet(engine: Engine, channel: Channel, rank: int, store: Any, timeout_s: float) -> None:
    mine = channel.members[rank]
    said = {"torch": mine, "mpi": engine.rank, "size": engine.size, "needs": max(channel.members) + 1}
    if len(channel.members) == 1:
        verdict = _judge({mine: [said]})
    else:
        agreement = Agreement(store, rank=mine, members=channel.members, prefix="dtprobe.mpi")
        try:
            verdict = agreement.reach(said, _judge, timeout_s, what=f"creation of group {channel.name!r}")
        finally:
            agreement.close()
    if verdict:
        raise RankDisagreement(verdict["wrong"], REMEDY, ranks=verdict["ranks"])


def _judge(heard: Mapping[int, list[Said]]) -> Said:
    wrong = {
        rank: f"torch says rank {rank}, MPI says rank {said['mpi']} of {said['size']}"
        for rank, each in sorted(heard.items())
        for said in each
        if said["mpi"] != rank or said["needs"] > said["size"]
    }
    twice = [rank for rank, each in heard.items() if len(each) > 1]
    if twice:
        return {"ranks": twice, "wrong": f"two processes claim to be {named(twice)}"}
    return {"ranks": list(wrong), "wrong": "; ".join(wrong.values())} if wrong else {}


def _sizes(tensors: Tensors) -> str:
    return f"{len(tensors)} tensor{'s' * (len(tensors) > 1)}, {sum(each.numel() for each in tensors)} {tensors[0].dtype}"
