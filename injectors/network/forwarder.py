"""Two TAP devices a rank with a program between, which holds packets back: what netem does, where the kernel has none.

One thread passes packets between all pairs. Each way of a pair keeps its order but for packets that are meant to be overtaken.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 1, 2, 4
CLONE_NEWNET = 0x40000000
PACKET_MAX = 1 << 17
QUEUE_BYTES = 64 << 20
BURST = 64


@dataclass(eq=False)
class Hold:
    """How packets of one way are held: `seconds` each, give or take `jitter_s`; of those, `overtaken` (0..1) are held `seconds`
    while the others pass at once."""

    seconds: float
    jitter_s: float = 0.0
    overtaken: float | None = None
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    count: int = 0
    passed: int = 0


class Way:
    """Packets from one TAP to the other."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.target = target
        self.holds: list[Hold] = []
        self.queued = 0
        self.lost = 0
        self._last = 0.0

    def due(self, now: float) -> float:
        """When a packet that comes now has to go on."""
        at, overtaken = now, False
        for hold in self.holds:
            hold.passed += 1
            if hold.overtaken is None:
                hold.count += 1
                at += max(0.0, hold.seconds + hold.jitter_s * hold.dice.uniform(-1, 1))
            elif hold.dice.random() < hold.overtaken:
                hold.count += 1
                overtaken = True
                at += hold.seconds
        if overtaken:
            return at
        self._last = at = max(at, self._last)
        return at


class Forwarder:
    """All pairs of TAPs of a run: rank -> its namespace (device `dtp0`) and the bridge's (device `port<rank>`).

    `whole` lets segments pass that are larger than a packet, as between veths: it is what makes it fast.
    """

    def __init__(self, pairs: dict[int, tuple[str, str]], *, whole: bool) -> None:
        self.ways: dict[tuple[int, str], Way] = {}
        self._queue: list[tuple[float, int, Way, bytes]] = []
        self._lock = threading.Lock()
        self._end, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="forwarder", daemon=True)
        self._count = 0
        for rank, (own, switch) in pairs.items():
            inner, outer = tap(own, "dtp0", whole=whole), tap(switch, f"port{rank}", whole=whole)
            self.ways[(rank, "out")] = Way(inner, outer)
            self.ways[(rank, "in")] = Way(outer, inner)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        os.write(self._wake, b"x")
        self._thread.join(5)

    def hold(self, rank: int, way: str, hold: Hold) -> None:
        with self._lock:
            self.ways[(rank, way)].holds.append(hold)

    def release(self, rank: int, way: str, hold: Hold) -> None:
        with self._lock:
            self.ways[(rank, way)].holds.remove(hold)

    def _run(self) -> None:
        poller = select.epoll()
        poller.register(self._end, select.EPOLLIN)
        ways = {way.source: way for way in self.ways.values()}
        for source in ways:
            poller.register(source, select.EPOLLIN)
        while True:
            wait_s = max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else 1.0
            for descriptor, _ in poller.poll(wait_s):
                if descriptor == self._end:
                    return
                self._take(ways[descriptor])
            self._pass_on()

    def _take(self, way: Way) -> None:
        for _ in range(BURST):
            try:
                packet = os.read(way.source, PACKET_MAX)
            except BlockingIOError:
                return
            now = time.monotonic()
            with self._lock:
                due = way.due(now)
            if due <= now:
                self._write(way, packet)
            elif way.queued + len(packet) > QUEUE_BYTES:
                way.lost += 1
            else:
                way.queued += len(packet)
                self._count += 1
                heapq.heappush(self._queue, (due, self._count, way, packet))

    def _pass_on(self) -> None:
        now = time.monotonic()
        while self._queue and self._queue[0][0] <= now:
            _, _, way, packet = heapq.heappop(self._queue)
            way.queued -= len(packet)
            self._write(way, packet)

    @staticmethod
    def _write(way: Way, packet: bytes) -> None:
        try:
            os.write(way.target, packet)
        except OSError:  # the device is down (a flap), or its queue is full: lost, as on a wire
            way.lost += 1


def tap(space: str, name: str, *, whole: bool) -> int:
    """A TAP device in a network namespace; it lives as long as the descriptor."""
    with within(space):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        flags = IFF_TAP | IFF_NO_PI | (IFF_VNET_HDR if whole else 0)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        if whole:
            fcntl.ioctl(descriptor, TUNSETVNETHDRSZ, struct.pack("i", 10))
            fcntl.ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    return descriptor


@contextmanager
def within(space: str) -> Iterator[None]:
    """This thread in another network namespace, for as long as the block lasts."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    there = os.open(f"/run/netns/{space}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _setns(libc, there)
        try:
            yield
        finally:
            _setns(libc, own)
    finally:
        os.close(own)
        os.close(there)


def _setns(libc: ctypes.CDLL, descriptor: int) -> None:
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
