"""Encrypted point-to-point messages over a gloo group: seal and send, receive and open, in buffers that are used again."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from dtprobe.framework.errors import FrameworkError, GroupEnded, RankError
from dtprobe.framework.transport.secure.errors import NotCovered, PeerSilent
from dtprobe.framework.transport.secure.records import Description, Opener, Rotation, Sealer, sealed_size
from dtprobe.framework.transport.secure.session import Channel, Session

COLLECTIVES = 1 << 30
"""The tag under which collectives travel; tags of users are below it."""

_KEPT_BYTES = 256 << 20


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The storage of a contiguous CPU tensor of any dtype as bytes, without a copy. It keeps the storage alive."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    size = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8)
    flat.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (tensor.numel() * size,), (1,))
    return flat.numpy().data


class Buffers:
    """Buffers of ciphertext by size, used again: the page faults of a fresh one cost more than the cipher. Thread-safe."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._kept = 0
        self._turn = threading.Lock()

    def take(self, size: int) -> torch.Tensor:
        """A uint8 tensor of `size` elements, contents undefined."""
        with self._turn:
            if self._free[size]:
                self._kept -= size
                return self._free[size].pop()
        return torch.empty(size, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        with self._turn:
            if self._kept + buffer.numel() <= _KEPT_BYTES:
                self._kept += buffer.numel()
                self._free[buffer.numel()].append(buffer)


@dataclass(frozen=True)
class Members:
    """Who is in the group: global ranks in group order, and this process's place among them."""

    ranks: tuple[int, ...]
    me: int

    @property
    def rank(self) -> int:
        return self.ranks[self.me]


class Sent:
    """A message on its way."""

    def __init__(self, wire: Wire, work: dist.Work, buffer: torch.Tensor, to: int) -> None:
        self._wire, self._work, self._buffer, self._to = wire, work, buffer, to

    def finish(self, timeout: timedelta) -> None:
        """Wait until the buffer may be used again. Call it once: a second wait for a gloo send blocks."""
        self._wire.wait(self._work, timeout, f"sending to rank {self._to}", self._to)
        self._wire.buffers.give(self._buffer)


@dataclass
class Expected:
    """A message that is waited for; `source` is a group rank, None for any."""

    tensor: torch.Tensor
    description: Description
    tag: int
    source: int | None
    work: dist.Work
    buffer: torch.Tensor
    done: bool = False
    failed: BaseException | None = None


@dataclass
class _Lane:
    """The receiving end of one channel: messages are opened in the order in which they were asked for."""

    opener: Opener
    pending: deque[Expected] = field(default_factory=deque)
    turn: threading.Lock = field(default_factory=threading.Lock)


class Wire:
    """Sealed messages between the members of one group, over the group `inner` (gloo) behind. Ranks are group ranks."""

    def __init__(
        self, inner: Callable[[], dist.ProcessGroup], session: Session, members: Members, rotation: Rotation | None
    ) -> None:
        self.members = members
        self.buffers = Buffers()
        self._inner = inner
        self._session = session
        self._rotation = rotation
        self._sealers: dict[tuple[int, int], tuple[Sealer, threading.Lock]] = {}
        self._lanes: dict[tuple[int, int], _Lane] = {}
        self._turn = threading.Lock()

    def rotate(self) -> None:
        """Every message sealed from now on is of the next epoch."""
        with self._turn:
            sealers = list(self._sealers.values())
        for sealer, turn in sealers:
            with turn:
                sealer.rotate()

    def send(self, tensor: torch.Tensor, to: int, name: str, tag: int = COLLECTIVES) -> Sent:
        """Seal `tensor` (contiguous, CPU) from its storage and send it to `to`."""
        plain = bytes_of(tensor)
        buffer = self.buffers.take(sealed_size(len(plain)))
        sealer, turn = self._sealer(to, tag)
        with turn:
            sealer.seal(plain, described(tensor, name), buffer.numpy().data)
            work = self._inner().send([buffer], to, tag)
        return Sent(self, work, buffer, self.members.ranks[to])

    def expect(self, tensor: torch.Tensor, source: int | None, name: str, tag: int = COLLECTIVES) -> Expected:
        """Ask for a message for `tensor` (contiguous, CPU) of `source`; None takes one of any member."""
        buffer = self.buffers.take(sealed_size(tensor.numel() * tensor.element_size()))
        if source is None:
            work = self._inner().recv_anysource([buffer], tag)
            return Expected(tensor, described(tensor, name), tag, None, work, buffer)
        lane = self._lane(source, tag)
        with lane.turn:
            work = self._inner().recv([buffer], source, tag)
            expected = Expected(tensor, described(tensor, name), tag, source, work, buffer)
            lane.pending.append(expected)
        return expected

    def finish(self, expected: Expected, timeout: timedelta) -> None:
        """Wait for the message and open it into its tensor, after those that were asked for before it on its channel."""
        if expected.source is None:
            self._finish_any(expected, timeout)
        else:
            lane = self._lane(expected.source, expected.tag)
            with lane.turn:
                while not expected.done:
                    self._take(lane, lane.pending.popleft(), expected.source, timeout)
        if expected.failed is not None:
            raise expected.failed

    def _finish_any(self, expected: Expected, timeout: timedelta) -> None:
        if expected.done:
            return
        self.wait(expected.work, timeout, "receiving from any rank", None)
        expected.source = expected.work._source_rank()
        lane = self._lane(expected.source, expected.tag)
        with lane.turn:
            self._open(lane, expected)

    def _take(self, lane: _Lane, expected: Expected, source: int, timeout: timedelta) -> None:
        rank = self.members.ranks[source]
        try:
            self.wait(expected.work, timeout, f"receiving {expected.description.name} from rank {rank}", rank)
        except (RankError, GroupEnded) as error:
            expected.done, expected.failed = True, error.detached()
            return
        self._open(lane, expected)

    def _open(self, lane: _Lane, expected: Expected) -> None:
        try:
            lane.opener.open(expected.buffer.numpy().data, expected.description, bytes_of(expected.tensor))
        except FrameworkError as error:
            expected.failed = error.detached()
        expected.done = True
        self.buffers.give(expected.buffer)

    def wait(self, work: dist.Work, timeout: timedelta, what: str, rank: int | None) -> None:
        try:
            work.wait(timeout) if timeout > timedelta(0) else work.wait()
        except RuntimeError as error:
            if isinstance(error, FrameworkError):
                raise
            why = str(error).strip().rpartition("] ")[2].partition("\n")[0][:200]
            raise PeerSilent(
                f"rank {self.members.rank}, {what}: {why}",
                "look at the named rank first: it ended, or never came to this operation",
                ranks=() if rank is None else (rank,),
            ) from None

    def _sealer(self, to: int, tag: int) -> tuple[Sealer, threading.Lock]:
        with self._turn:
            if (to, tag) not in self._sealers:
                channel = Channel(self.members.rank, self.members.ranks[to], _lane_name(tag))
                self._sealers[to, tag] = (Sealer(self._session, channel, rotation=self._rotation), threading.Lock())
            return self._sealers[to, tag]

    def _lane(self, source: int, tag: int) -> _Lane:
        with self._turn:
            if (source, tag) not in self._lanes:
                channel = Channel(self.members.ranks[source], self.members.rank, _lane_name(tag))
                self._lanes[source, tag] = _Lane(Opener(self._session, channel))
            return self._lanes[source, tag]


def described(tensor: torch.Tensor, name: str) -> Description:
    return Description(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def covered(tensor: torch.Tensor) -> None:
    """Raises NotCovered for a tensor whose bytes are not in host memory, in rows."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise NotCovered(
            f"a {tensor.layout} tensor on {tensor.device} cannot be sent encrypted",
            "move it to the CPU and make it dense, or encrypt the network below (IPsec, WireGuard)",
        )


def _lane_name(tag: int) -> str:
    return "collectives" if tag == COLLECTIVES else f"tag {tag}"
