"""What the engines of a job say to each other beside the collectives: where a rank is, that a group broke, that a rank left.

Short JSON messages on a communicator of their own. Each engine listens even while its program computes or sleeps, so a rank
whose time runs out learns which ranks have not begun the operation that it waits for, and which do not answer at all.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from dtprobe.framework.agreement import named
from dtprobe.framework.errors import FrameworkError
from dtprobe.framework.transport.mpi.errors import CollectiveTimeout, PeerLost

if TYPE_CHECKING:
    from dtprobe.framework.transport.mpi.engine import Engine
    from dtprobe.framework.transport.mpi.operation import Channel, Operation

_TAG = 7
_LISTEN_S = 5e-3
_GRACE_S = 1.0
_DEAD = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)


class Talk:
    """One rank's side. Every method is called by the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._comm = MPI.COMM_WORLD.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._heard: dict[tuple[int, str], dict[str, Any]] = {}
        self._left: dict[int, tuple[float, dict[str, int]]] = {}
        self._dead: set[int] = set()
        self._broken = False
        self._next = 0.0

    def listen(self) -> None:
        """Take what has arrived, at most every few milliseconds: a probe also lets MPI make progress."""
        now = self._engine.clock()
        if now < self._next:
            return
        self._next = now + _LISTEN_S
        try:
            status = MPI.Status()
            while (message := self._comm.Improbe(MPI.ANY_SOURCE, _TAG, status)) is not None:
                taken = bytearray(status.Get_count(MPI.BYTE))
                message.Recv([taken, MPI.BYTE])
                self._take(status.Get_source(), json.loads(taken))
        except MPI.Exception as error:
            if error.Get_error_class() not in _DEAD:
                raise
            self._note_dead(self._comm)
        self._sent = [each for each in self._sent if not _complete(each[0])]

    def ask(self, operation: Operation) -> None:
        """Ask the other members how far they are on the operation's group."""
        for rank in operation.needs:
            self._heard.pop((rank, operation.channel.name), None)
            self._say(rank, {"kind": "where", "group": operation.channel.name})

    def tell_broken(self, channel: Channel, failure: FrameworkError) -> None:
        """Tell the other members of a group that it cannot be used any more, and why."""
        self._broken = True
        said = {"kind": "broken", "group": channel.name, "members": list(channel.members), "why": str(failure)[:500]}
        for rank in channel.members:
            if rank != self._engine.rank:
                self._say(rank, said | {"ranks": list(getattr(failure, "ranks", ()))})

    def revoked(self, channel: Channel) -> bool:
        """Whether a member gave the group up by means of MPI."""
        try:
            return channel.comm.Is_revoked() or channel.beside.comm.Is_revoked()
        except (MPI.Exception, NotImplementedError):
            return False

    def spread(self, room: bytearray, what: str, timeout_s: float) -> None:
        """Rank 0's content of `room` to all ranks, in the thread; raises CollectiveTimeout."""
        deadline = self._engine.clock() + timeout_s
        request = self._comm.Ibcast([room, MPI.BYTE], 0)
        while not request.Test():
            if self._engine.clock() > deadline:
                self._broken = True
                raise CollectiveTimeout(f"{what}: rank 0 did not come within {timeout_s:.3g} s", ranks=(0,), operation=what)
            self.listen()
            self._engine.rest()

    def revoke(self, channel: Channel) -> None:
        """Where the library is fault tolerant, make it give back the requests of a broken group."""
        self._broken = True
        try:
            channel.comm.Revoke()
            channel.beside.comm.Revoke()
        except (MPI.Exception, NotImplementedError):
            return  # not fault tolerant: the requests stay, and with them their memory

    def lost(self, operation: Operation) -> PeerLost | None:
        """The error of an operation that a rank needed for it left without having begun it."""
        for rank in operation.needs:
            when, issued = self._left.get(rank, (None, {}))
            begun = operation.number is not None and issued.get(operation.channel.name, 0) >= operation.number
            if when is not None and not begun and self._engine.clock() > when + _GRACE_S:
                return PeerLost(f"{operation.what}: rank {rank} has ended without taking part", _LOOK, ranks=(rank,))
        dead = self._dead.intersection(operation.needs)
        if dead:
            return self.peer_lost(operation)
        return None

    def peer_lost(self, operation: Operation) -> PeerLost:
        """The error of an operation that MPI gave up because a process of its group failed, or because a member revoked it.

        A member that revokes a group says why, and what it says may come a little later than the revocation.
        """
        self._note_dead(operation.channel.comm)
        until = self._engine.clock() + _GRACE_S
        while not self._dead.intersection(operation.channel.members) and self._engine.clock() < until:
            if isinstance(operation.channel.failure, PeerLost):
                return operation.channel.failure
            self._engine.rest()
            self.listen()
        dead = self._dead.intersection(operation.channel.members)
        if dead:
            return PeerLost(f"{operation.what}: {named(dead)} died", _LOOK, ranks=dead)
        return PeerLost(f"{operation.what}: another rank gave the group up", "look at the other ranks' errors")

    def late(self, operation: Operation) -> CollectiveTimeout:
        """The error of an operation whose time is over, with what the other members said about themselves."""
        channel, number = operation.channel, operation.number
        silent, behind, there = [], {}, []
        for rank in operation.needs:
            answer = self._heard.get((rank, channel.name))
            if answer is None:
                silent.append(rank)
            elif number is not None and answer["issued"] < number:
                behind[rank] = f"rank {rank} is at operation {answer['issued']} of the group ({answer['doing']})"
            else:
                there.append(f"rank {rank} is at {answer['doing']}")
        said = list(behind.values())
        if silent:
            said.append(
                f"{named(silent)} {'does' if len(silent) == 1 else 'do'} not answer (dead, stopped, or holding the GIL)"
            )
        if not said:
            said = there
        place = f" (operation {number} of the group)" if number is not None else ""
        return CollectiveTimeout(
            f"{operation.what}{place}: not complete within {operation.timeout_s:.3g} s; {'; '.join(said) or 'no rank is known to miss'}",
            _LOOK,
            ranks=operation.needs if number is None and len(operation.needs) == 1 else [*silent, *behind],
            operation=operation.what,
        )

    def farewell(self) -> bool:
        """Tell every rank that this one ends; whether MPI may be finalised, for which MPI waits until all ranks have come.

        Not after a failure: Open MPI 5.0.11 then hung in MPI_Finalize once in six times, with all living ranks in it.
        """
        issued = {channel.name: channel.issued for channel in self._engine.channels.values()}
        for rank in range(self._engine.size):
            if rank != self._engine.rank:
                self._say(rank, {"kind": "left", "issued": issued})
        until = self._engine.clock() + _GRACE_S
        while self._sent and self._engine.clock() < until:
            self._engine.rest()
            self.listen()
        return not (self._broken or self._dead or self._sent)

    def _say(self, rank: int, what: dict[str, Any]) -> None:
        data = json.dumps(what).encode()
        try:
            self._sent.append((self._comm.Isend([data, MPI.BYTE], rank, _TAG), data))
        except MPI.Exception:
            self._note_dead(self._comm)

    def _take(self, source: int, said: dict[str, Any]) -> None:
        if said["kind"] == "where":
            channel = self._engine.channels.get(said["group"])
            issued, doing = (channel.issued, channel.doing) if channel else (0, "a point before it made the group")
            self._say(source, {"kind": "here", "group": said["group"], "issued": issued, "doing": doing})
        elif said["kind"] == "here":
            self._heard[source, said["group"]] = said
        elif said["kind"] == "left":
            self._left[source] = (self._engine.clock(), said["issued"])
        elif said["kind"] == "broken":
            channel = self._engine.channels.get(said["group"])
            if channel is not None and list(channel.members) == said["members"]:
                failure = PeerLost(f"rank {source} gave the group up: {said['why']}", ranks=said["ranks"])
                self._engine.break_channel(channel, failure, tell=False)

    def _note_dead(self, comm: MPI.Comm) -> None:
        try:
            failed = comm.Get_failed()
            world = MPI.COMM_WORLD.Get_group()
            ranks = MPI.Group.Translate_ranks(failed, list(range(failed.Get_size())), world)
            self._comm.Ack_failed(self._comm.Get_size())
        except (MPI.Exception, NotImplementedError):
            return  # not fault tolerant: the dead are known by their silence only
        self._dead.update(int(rank) for rank in ranks)


_LOOK = "look at the named ranks first"


def _complete(request: MPI.Request) -> bool:
    try:
        return bool(request.Test())
    except MPI.Exception:
        return True  # to a rank that is gone
