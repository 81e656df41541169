"""Two ranks measure the link between them: the lower one leads, the higher one answers, each within a slot of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from dtprobe.doctor.cluster import clocks
from dtprobe.doctor.cluster.matrix import Link

_PING, _PUSH, _PULL, _END = range(4)
_WARM_UP = 5
_PINGS = 50
_FIRST = 4096
_LARGEST = {"cpu": 8 << 20, "cuda": 64 << 20}
_REPEATS = 7
_LEAST_REPEATS = 3


class Wire:
    """One end of the link to a peer over a process group. Raises RuntimeError when the peer says nothing for `limit_s` seconds."""

    def __init__(self, group: dist.ProcessGroup, *, device: str, limit_s: float, clock: Callable[[], float]) -> None:
        self._group, self._device, self._limit_s, self._clock = group, device, limit_s, clock
        self._head = torch.zeros(4, dtype=torch.int64, device=device)
        self.room = torch.zeros(_LARGEST[device], dtype=torch.uint8, device=device)

    def say(self, peer: int, *words: int) -> None:
        self._head.copy_(torch.tensor([*words, *[0] * (4 - len(words))]))
        self.send(self._head, peer)

    def hear(self, peer: int) -> list[int]:
        self.recv(self._head, peer)
        return self._head.tolist()

    def send(self, data: torch.Tensor, peer: int) -> None:
        self._done(dist.isend(data, peer, group=self._group))

    def recv(self, data: torch.Tensor, peer: int) -> None:
        self._done(dist.irecv(data, peer, group=self._group))

    def _done(self, work: dist.Work | None) -> None:
        if work is None:
            raise RuntimeError("this rank is no member of the group")
        if self._device == "cpu":
            work.wait(timedelta(seconds=self._limit_s))
        else:
            work.wait()
            self.settle()

    def settle(self) -> None:
        """Return when what was queued on the GPU is done. A synchronize could not be left again: look at an event until it is time."""
        if self._device == "cpu":
            return
        event = torch.cuda.Event()
        event.record()
        deadline = self._clock() + self._limit_s
        while not event.query():
            if self._clock() > deadline:
                raise RuntimeError(f"NCCL: no answer within {self._limit_s:g} s")


def answer(wire: Wire, peer: int, *, wall_ns: Callable[[], int] = time.time_ns) -> None:
    """The higher rank's side: do what the peer asks until it says that it is done."""
    while True:
        op, size, *_ = wire.hear(peer)
        came_ns = wall_ns()
        if op == _PING:
            wire.say(peer, op, came_ns, wall_ns())
        elif op == _PUSH:
            wire.recv(wire.room[:size], peer)
            wire.say(peer, op)
        elif op == _PULL:
            wire.send(wire.room[:size], peer)
        else:
            return


def lead(
    wire: Wire,
    rank: int,
    peer: int,
    *,
    transport: str,
    kind: str,
    slot_s: float,
    clock: Callable[[], float] = time.perf_counter,
    wall_ns: Callable[[], int] = time.time_ns,
) -> Link:
    """The lower rank's side: measure the link to `peer` in about `slot_s` seconds, on a slow link in a few messages more."""
    wire.say(peer, _PING, 0)  # NCCL connects on the first message: 0.4 s, which is no part of the link
    wire.hear(peer)
    deadline = clock() + slot_s
    trips: list[float] = []
    stamps: list[clocks.Stamps] = []
    for number in range(_WARM_UP + _PINGS):
        begun, t0 = clock(), wall_ns()
        wire.say(peer, _PING, 0)
        _, t1, t2, _ = wire.hear(peer)
        t3, took = wall_ns(), clock() - begun
        if number >= _WARM_UP or not trips:
            trips.append(took)
            stamps.append((t0, t1, t2, t3))
        if clock() > deadline - slot_s * 0.75:
            break
    trip = median(trips)

    def timed(op: int, size: int) -> float:
        begun = clock()
        wire.say(peer, op, size)
        if op == _PUSH:
            wire.send(wire.room[:size], peer)
            wire.hear(peer)
        else:
            wire.recv(wire.room[:size], peer)
        took = clock() - begun
        return max(took - min(trips), took / 2)

    # grow until one message fills a good part of the slot: that is warm-up too. The better of two tries, so that a hiccup of the
    # scheduler does not end the growth where the round trip is most of the time
    size = _FIRST
    while size < wire.room.numel() and min(timed(_PUSH, size), timed(_PULL, size), timed(_PUSH, size)) < slot_s / 20:
        size = min(size * 4, wire.room.numel())
    out: list[float] = []
    back: list[float] = []
    while len(out) < _REPEATS and (len(out) < _LEAST_REPEATS or clock() < deadline):
        out.append(timed(_PUSH, size))
        back.append(timed(_PULL, size))
        if clock() > deadline + slot_s:
            break
    wire.say(peer, _END)
    offset_s, uncertainty_s = clocks.between(stamps)
    synced = transport != "nccl"  # its kernels' queueing would be taken for distance
    return Link(
        transport=transport,
        a=rank,
        b=peer,
        kind=kind,
        latency_s=trip / 2,
        out_bytes_s=size / median(out),
        back_bytes_s=size / median(back),
        size=size,
        repeats=len(out),
        offset_s=offset_s if synced else None,
        uncertainty_s=uncertainty_s if synced else None,
    )
