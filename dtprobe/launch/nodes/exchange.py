"""How far a node's clock is off, by exchanges over its connection: each side stamps a message when it leaves and when it comes.

The rule is NTP's, as `dtprobe.doctor.cluster.clocks` has it: of a burst the exchange with the shortest round trip counts, and its
uncertainty is half of that trip.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dtprobe.doctor.cluster.clocks import Stamps, between
from dtprobe.readers.hosts import Reading

BURST = 16
ANSWER_S = 2.0
OPEN = 8
"""Exchanges that may wait for their answer at a time; older ones are given up."""


class Exchange:
    """The conductor's side for one node: `send` sends a ping, `answered` takes what came back."""

    def __init__(self, send: Callable[..., bool], now_ns: Callable[[], int]) -> None:
        self._send = send
        self._now_ns = now_ns
        self._numbers = itertools.count()
        self._open: dict[int, int] = {}
        self._recent: deque[Stamps] = deque(maxlen=BURST)
        self._came = threading.Condition()

    def ping(self) -> int:
        """Send one; its number."""
        number = next(self._numbers)
        with self._came:
            self._open = {number: self._now_ns(), **dict(list(self._open.items())[:OPEN])}
            left_ns = self._open[number]
        self._send(ping=number, t_ns=left_ns)
        return number

    def answered(self, message: Mapping[str, Any], t_ns: int) -> None:
        """A pong came at `t_ns`."""
        with self._came:
            left_ns = self._open.pop(int(message["pong"]), None)
            if left_ns is not None:
                self._recent.append((left_ns, int(message["came_ns"]), int(message["left_ns"]), t_ns))
                self._came.notify_all()

    def burst(self) -> Reading | None:
        """A reading from a burst of exchanges, one after the other; None where none was answered."""
        with self._came:
            self._recent.clear()
        for _ in range(BURST):
            if not self._waited(self.ping()):
                break
        return self.latest()

    def _waited(self, number: int) -> bool:
        with self._came:
            return self._came.wait_for(lambda: number not in self._open, ANSWER_S)

    def latest(self) -> Reading | None:
        """A reading from the last exchanges that there were: for a node that vanished it stands in for the burst at the end."""
        with self._came:
            recent = list(self._recent)
        if not recent:
            return None
        ahead_s, uncertainty_s = between(recent)
        came_ns = max(one[2] for one in recent)
        return Reading(t_ns=came_ns, offset_ns=-round(ahead_s * 1e9), uncertainty_ns=max(1, round(uncertainty_s * 1e9)))
