"""Point-to-point messages between pipeline stages: batched, ordered, tagged, kept until done, and never waited for in vain.

What goes wrong without it, measured with torch 2.13 over gloo: an `isend` whose handle is dropped is cancelled and its receiver
times out (the tensor may be dropped, the handle holds it); a buffer written before completion arrives with the new values; a message longer
than its buffer ends the receiver's process (SIGABRT), a shorter one or one of another dtype arrives as garbage; untagged
messages posted in another order swap silently; and the timeout names no stage, nor does it come first where the fault is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtprobe.errors import UsageError
from dtprobe.framework.agreement import Agreement, Said, difference, named
from dtprobe.framework.errors import GroupMismatch
from dtprobe.framework.forwarding import stand_in
from dtprobe.framework.groups import ScopedGroup
from dtprobe.framework.pipeline.blame import Item, Report
from dtprobe.framework.pipeline.board import Board, How, Verdict, mismatch, serves
from dtprobe.framework.pipeline.errors import BufferBusy, MessageMismatch, StageError, StageLost, StageTimeout
from dtprobe.framework.pipeline.handle import Handle, Wait
from dtprobe.framework.pipeline.messages import Channel, Direction, Message, Transfer, contract, empty
from dtprobe.framework.pipeline.waits import Waits
from dtprobe.framework.pipeline.watched import WatchedGroup
from dtprobe.framework.pipeline.watcher import Watcher

_LATE_S = (1.0, 3.0)
"""How much longer than the watcher's deadline the back end itself waits, and after it the main thread for the watcher's verdict: a
quarter of the timeout within these bounds. Together they outlast one lost DNS reply (5 s): TCPStore resolves its peers' names."""

_ERRORS: dict[How, type[StageError]] = {"timeout": StageTimeout, "lost": StageLost, "mismatch": MessageMismatch}
_REMEDIES: dict[How, str] = {
    "timeout": "look at that stage first (py-spy dump, its log); if it only needs longer, raise timeout_s",
    "lost": "look at that stage's output and exit status first",
    "mismatch": "make both ends agree, or open the exchange with dynamic=True",
}

_opened: Counter[str] = Counter()
"""How often this process opened an exchange over a group: each has keys of its own in the store."""


class Exchange:
    """Messages between the stages of one pipeline, over a group made by `Groups.create`. One thread posts and waits.

    `stages` is how many there are (default: one a rank; stage i is on rank i modulo the group's size, as in torch's
    pipelining, until `place`). A wait fails after `timeout_s` seconds. With `dynamic`, each message may have its own shape
    and receivers may pass no tensor (they get one on the CPU); without it the dtype and shape of a channel's first message hold for all.

    All ranks of the group open it together: GroupMismatch names those whose arguments differ, MissingRanks those that do not come.
    Use it as a context manager: leaving it with an exception tells the other stages, which then raise StageLost.
    """

    def __init__(
        self,
        group: ScopedGroup,
        *,
        stages: int | None = None,
        timeout_s: float = 60.0,
        dynamic: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(group, ScopedGroup):
            raise UsageError(
                f"an exchange over a {type(group).__name__}", "make the group with dtprobe.framework.Groups.create"
            )
        if group not in c10d._world.pg_map:
            raise UsageError(f"group {group.label!r} is in use by another exchange, or has ended", "close that one first")
        self.timeout_s = timeout_s
        self._late_s = min(max(timeout_s / 4, _LATE_S[0]), _LATE_S[1])
        self.clock = clock
        self.members = group.members
        self.rank = group.rank()
        self.completed = 0
        self.failure: Verdict | None = None
        self.changed = threading.Condition()
        self.waiting: Wait | None = None
        self.proposal: Verdict | None = None
        self._waits = Waits()
        self._size = stages or group.size()
        self._dynamic = dynamic
        self._closed = False
        self._placement = {stage: stage % group.size() for stage in range(self._size)}
        self._outstanding: list[Handle] = []
        self._unsettled: list[Handle] = []
        self._posted: Counter[Channel] = Counter()
        self._received: Counter[Channel] = Counter()
        self._contracts: dict[Channel, str] = {}
        self._tagged: set[str] = set()
        self._occasions: Counter[tuple[Message, Direction]] = Counter()
        store: Any = c10d._get_default_store()
        prefix = f"dtprobe.exchange/{group.group_name}/{_opened[group.group_name]}"
        _opened[group.group_name] += 1
        host = self._agree(store, prefix)
        self._board = Board(store, prefix, self.rank)
        self._scoped = group
        self.group = WatchedGroup(group, self)
        stand_in(self.group, group)
        self._watcher = Watcher(self, Board(store.clone(), prefix, self.rank), size=group.size(), host=host)
        self._watcher.start()

    def place(self, placement: Mapping[int, int]) -> None:
        """Say on which rank of the group each stage is, where it is not stage modulo size."""
        self._placement = dict(placement)

    @property
    def placement(self) -> Mapping[int, int]:
        """On which rank of the group each stage is."""
        return self._placement

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank of the group."""
        return [stage for stage, where in self._placement.items() if where == rank]

    # messages

    def post(self, transfers: Sequence[Transfer]) -> list[Handle]:
        """Issue messages as one batch, in the order of their names whatever the order given; their handles, as given.

        Nothing is waited for. Raises UsageError for a message that is outstanding already, BufferBusy for a buffer that an outstanding
        message uses, MessageMismatch when a tensor is not what its channel carries, and the exchange's failure once it has failed.
        """
        self.raise_failure()
        handles = [self._handle(transfer) for transfer in transfers]
        ready = []
        for handle in sorted(handles, key=lambda each: each.item.message):
            self._outstanding.append(handle)
            self._posted[handle.item.message.channel] += 1
            if self._settled(handle):
                ready.append(handle)
            else:
                self._unsettled.append(handle)
        for handle in ready:
            self._issue_or_fail(handle)
        return handles

    def wait(self, handles: Iterable[Handle], timeout_s: float | None = None) -> None:
        """Wait until all of `handles` have completed, `timeout_s` seconds at most (default: the exchange's).

        Raises StageTimeout, StageLost or MessageMismatch naming the stage at the root, on every rank of the exchange; the exchange is
        of no use afterwards. Raises BufferBusy for a sent tensor that was written before its completion.
        """
        open_ = tuple(sorted((each for each in handles if not each.done), key=lambda each: each.item.message))
        if not open_:
            return
        self.raise_failure()
        now = self.clock()
        self.waiting = Wait(open_, now, now + (self.timeout_s if timeout_s is None else timeout_s))
        try:
            if self.unsettled():
                with self.changed:
                    self._watcher.hurry()
            for handle in open_:
                self._complete(handle, self.waiting.deadline)
        finally:
            self.waiting = None

    def wait_all(self, timeout_s: float | None = None) -> None:
        """Wait for everything that is outstanding; see `wait`."""
        self.wait(list(self._outstanding), timeout_s)

    def post_raw(self, direction: Direction, tensor: torch.Tensor, rank: int, tag: int) -> Handle:
        """A message that does not come from a Transfer but over the exchange's group, such as torch's set-up messages."""
        self.raise_failure()
        mine, theirs = (min(self.stages_of(each), default=each) for each in (self.rank, rank))
        source, destination = (mine, theirs) if direction == "send" else (theirs, mine)
        channel = Channel("set-up", source, destination)
        item = Item(direction, Message(tag, channel), self._posted[channel], contract(tensor))
        handle = Handle(self, item, rank, tensor, tag)
        self._outstanding.append(handle)
        self._posted[channel] += 1
        self._issue_or_fail(handle)
        return handle

    # life

    def close(self) -> None:
        """Stop watching and let every handle go. Local; what is outstanding is cancelled. The group remains."""
        if self._closed:
            return
        self._closed = True
        self._watcher.stop()
        self._waits.stop()
        if not self._scoped.ended:
            stand_in(self._scoped, self.group)
        for handle in self._outstanding:
            handle.work = handle.wire = handle.tensor = None
        self._outstanding.clear()
        self._unsettled.clear()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.wait_all()
            elif self.failure is None:
                mine = self.stages_of(self.rank)
                text = f"{_stages(mine)} left with {type(error).__name__}: {str(error)[:300]}"
                self._settle(Verdict("lost", mine[0] if mine else None, self.rank, text))
        finally:
            self.close()

    # what the watcher asks and does

    def report(self) -> Report | None:
        """What this rank waits for, and what it has posted; None while it waits for nothing."""
        wait = self.waiting
        awaited = tuple(each.item for each in wait.handles if not each.done) if wait else ()
        if not awaited:
            return None
        pending = tuple(each.item for each in list(self._outstanding) if not each.done)
        return Report(awaited, pending, dict(self._posted), dict(self._received))

    def unsettled(self) -> bool:
        """Whether there are posted receives whose sender has not said yet what it sends."""
        return bool(self._unsettled)

    def settle_receives(self, board: Board) -> None:
        """Look for what the senders promised, and issue the receives whose buffers fit; a verdict where one does not."""
        for handle in list(self._unsettled):
            channel = handle.item.message.channel
            promised = board.promised(channel, handle.occasion, forget=self._dynamic)
            if promised is None:
                continue
            if handle.wire is None:
                handle.tensor = handle.wire = empty(promised, torch.device("cpu"))
            elif contract(handle.wire) != promised:
                self.fail(board.decide(mismatch(handle.item, promised, contract(handle.wire), self._placement)))
                return
            with self.changed:
                self._unsettled.remove(handle)
                self._contracts.setdefault(channel, promised)
                try:
                    self._issue(handle)
                except RuntimeError as error:
                    self.proposal = self._broken(handle, str(error))
                self.changed.notify_all()

    def fail(self, verdict: Verdict) -> None:
        """The exchange has failed: wake the main thread, wherever it waits."""
        with self.changed:
            if self.failure is not None:
                return
            self.failure = verdict
            self.changed.notify_all()
        self._scoped.abort()
        self._waits.give_up()

    # inside

    def _issue(self, handle: Handle) -> None:
        assert handle.wire is not None
        call = self._scoped.send if handle.item.direction == "send" else self._scoped.recv
        wire = torch.view_as_real(handle.wire) if handle.wire.is_complex() else handle.wire
        handle.work = call([wire], handle.rank, handle.tag)

    def _issue_or_fail(self, handle: Handle) -> None:
        why = ""
        try:
            self._issue(handle)
        except RuntimeError as error:  # gloo knows already that the connection is gone
            why = str(error)
        if why:
            self._give_up(handle, why, self.clock())

    def raise_failure(self, handle: Handle | None = None, waited_s: float | None = None) -> None:
        """Raise why the exchange failed, if it has."""
        verdict = self.failure
        if verdict is None:
            return
        awaited = (
            f" waited {waited_s:.3g} s for stage {handle.item.peer} {handle.item}" if handle and waited_s is not None else ""
        )
        where = f"{_stages(self.stages_of(self.rank))} (rank {self.members[self.rank]})"
        item = handle.item if handle else None
        error = _ERRORS[verdict.how](
            f"{where}{awaited}, {self.completed} messages done: {verdict.text}",
            _REMEDIES[verdict.how],
            ranks=() if verdict.rank is None else (self.members[verdict.rank],),
            stage=verdict.stage,
            microbatch=item.message.microbatch if item else None,
            kind=item.message.channel.kind if item else None,
            direction=item.direction if item else None,
            completed=self.completed,
        )
        raise error

    def _agree(self, store: object, prefix: str) -> int | None:
        """All ranks open the exchange alike; the group rank whose process hosts the store, if one does."""
        agreement = Agreement(store, rank=dist.get_rank(), members=self.members, prefix=f"{prefix}/open")
        said = {"stages": self._size, "dynamic": self._dynamic, "timeout_s": self.timeout_s, "serves": serves(store)}
        try:
            verdict = agreement.reach(said, _judge, self.timeout_s, what=f"opening of an exchange of {self._size} stages")
        finally:
            agreement.close()
        if "wrong" in verdict:
            raise GroupMismatch(verdict["wrong"], "open the exchange alike on every rank", ranks=verdict["ranks"])
        return self.members.index(verdict["host"]) if verdict["host"] is not None else None

    def _handle(self, transfer: Transfer) -> Handle:
        message = transfer.message(self._my_stage(transfer))
        if transfer.peer not in self._placement:
            raise UsageError(f"{message}: there is no stage {transfer.peer}", f"there are {len(self._placement)} stages")
        if any(each.item.message == message and each.item.direction == transfer.direction for each in self._outstanding):
            raise UsageError(f"{message} is outstanding already", "wait for it before posting it again")
        tensor = transfer.tensor
        if tensor is None and not (self._dynamic and transfer.direction == "receive"):
            raise UsageError(f"{message} has no tensor", "only a receive of an exchange with dynamic=True goes without")
        if tensor is not None and transfer.direction == "receive" and not tensor.is_contiguous():
            raise UsageError(f"{message} is to be received into a tensor that is not contiguous", "pass a contiguous one")
        if tensor is not None:
            self._refuse_untagged(message, tensor.device)
            self._refuse_busy(message, transfer.direction, tensor)
        agreed = contract(tensor) if tensor is not None else "any"
        item = Item(transfer.direction, message, self._posted[message.channel], agreed)
        handle = Handle(self, item, self._placement[transfer.peer], tensor, message.tag(self._size))
        if self._dynamic:
            handle.occasion = f"{message.microbatch}.{self._occasions[message, transfer.direction]}"
            self._occasions[message, transfer.direction] += 1
        if tensor is not None and not tensor.is_contiguous():
            handle.wire = tensor.contiguous()
        return handle

    def _my_stage(self, transfer: Transfer) -> int:
        mine = self.stages_of(self.rank)
        if transfer.stage is None and len(mine) == 1:
            return mine[0]
        if transfer.stage not in mine:
            raise UsageError(f"stage {transfer.stage} is not on this rank, which has {_stages(mine)}", "pass stage=")
        return transfer.stage

    def _refuse_untagged(self, message: Message, device: torch.device) -> None:
        if device.type not in self._tagged:
            backend = self._scoped.inner._get_backend(device).name()
            if not backend.endswith("gloo"):
                raise UsageError(
                    f"{message} is on {device}, which goes over {backend}: only gloo is known to keep messages apart by tag",
                    'make the group with backend="gloo"',
                )
            self._tagged.add(device.type)

    def _refuse_busy(self, message: Message, direction: Direction, tensor: torch.Tensor) -> None:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
        for other in self._outstanding:
            if other.wire is None or "receive" not in (direction, other.item.direction):
                continue
            start = other.wire.data_ptr()
            if start < end and begin < start + other.wire.numel() * other.wire.element_size():
                raise BufferBusy(f"{message}: its buffer is in use by {other.item.message}", "wait for that one first")

    def _settled(self, handle: Handle) -> bool:
        """Whether a new message may be handed to the back end at once: its channel carries what its tensor is."""
        item = handle.item
        agreed = self._contracts.get(item.message.channel)
        if item.direction == "send" and (agreed is None or self._dynamic):
            try:
                self._board.promise(item.message.channel, handle.occasion, item.contract)
            except dist.DistError:
                self._settle(Verdict("lost", None, None, "the store is gone"))
                self.raise_failure()
            self._contracts[item.message.channel] = item.contract
            return True
        if agreed is None or self._dynamic:
            return False
        if agreed != item.contract:
            sent, expected = (item.contract, agreed) if item.direction == "send" else (agreed, item.contract)
            self._settle(mismatch(item, sent, expected, self._placement))
            self.raise_failure()
        return True

    def _complete(self, handle: Handle, deadline: float) -> None:
        begun = self.clock()
        if handle.work is None:
            with self.changed:
                self.changed.wait_for(
                    lambda: handle.work is not None or self.failure is not None, deadline - begun + 2 * self._late_s
                )
            if handle.work is None:
                self._give_up(handle, "", begun)
        assert handle.work is not None
        if why := self._waits.through(handle.work, max(deadline - self.clock(), 0) + self._late_s, self._late_s):
            self._give_up(handle, why, begun)
        self.completed += 1
        if handle.item.direction == "receive":
            self._received[handle.item.message.channel] += 1
        self._outstanding.remove(handle)
        handle.finish()

    def _give_up(self, handle: Handle, why: str, begun: float) -> None:
        """A message failed: raise the verdict of the board, or what this rank can tell alone where the board does not answer."""
        if self.failure is None:
            self._settle(self._broken(handle, why))
        self.raise_failure(handle, self.clock() - begun)

    @staticmethod
    def _broken(handle: Handle, why: str) -> Verdict:
        """What the back end's error (or its silence, where `why` is empty) says about the other end of a message."""
        peer = handle.item.peer
        if not why or "Timed out" in why:
            return Verdict("timeout", peer, handle.rank, f"stage {peer} did not answer in time")
        return Verdict("lost", peer, handle.rank, f"stage {peer} ended: the connection to it closed")

    def _settle(self, verdict: Verdict) -> None:
        """Have the watcher put a verdict on the board; without a board this rank believes itself."""
        with self.changed:
            self.proposal = verdict
            self._watcher.hurry()
            self.changed.wait_for(lambda: self.failure is not None, self._late_s)
        self.fail(self._watcher.without_board(verdict))


def _judge(heard: Mapping[int, list[Said]]) -> Said:
    found = difference({rank: said[0] for rank, said in heard.items()}, ("stages", "dynamic", "timeout_s"))
    if found is not None:
        shown = "; ".join(
            f"{name}: " + ", ".join(f"rank {rank} {value}" for rank, value in sorted(each.items()))
            for name, each in found.fields.items()
        )
        return {"ranks": list(found.ranks), "wrong": f"{named(found.ranks)} open the exchange with other arguments: {shown}"}
    return {"host": next((rank for rank, said in heard.items() if said[0]["serves"]), None)}


def _stages(stages: Sequence[int]) -> str:
    return ("stage " if len(stages) == 1 else "stages ") + ", ".join(map(str, stages))
