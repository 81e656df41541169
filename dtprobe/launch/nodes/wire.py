"""A connection between the conductor and an agent: JSON objects, one a line, in both directions.

A thread reads. What `soon` takes is done with at once in that thread (clock exchanges, parts of files), everything else waits in a queue.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

Message = Mapping[str, Any]
LONGEST = 16 << 20
"""Bytes of one line: a part of a file and its envelope are a tenth of it."""


class Wire:
    """One end. `soon(message, t_ns)` is asked first, with the moment of arrival by `now_ns`; it says whether it has dealt with it.

    What is sent and not acknowledged for `patience_s` ends the connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        soon: Callable[[Message, int], bool],
        now_ns: Callable[[], int],
        patience_s: float,
        rest: bytes = b"",
    ) -> None:
        self.heard = time.monotonic()
        self.lost: str = ""
        """Why the connection is at its end; empty while it stands."""
        self._sock = sock
        self._soon = soon
        self._now_ns = now_ns
        self._rest = rest
        self._queue: queue.Queue[Message | None] = queue.Queue()
        self._sending = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        # Both ends notice by themselves: a send into silence must not hold its thread for the kernel's quarter of an hour.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(patience_s * 1000))
        self._thread = threading.Thread(target=self._read, name="dtprobe-wire", daemon=True)
        self._thread.start()

    def send(self, **message: Any) -> bool:
        """Send a message; False where the connection is at its end."""
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            try:
                self._sock.sendall(data)
            except OSError as error:
                self._end(error.strerror or str(error))
                return False
        return True

    def next(self, timeout_s: float) -> Message | None:
        """The next message of the queue; None after so long, or at the end of the connection (then `lost` says why)."""
        with suppress(queue.Empty):
            return self._queue.get(timeout=max(0.0, timeout_s))
        return None

    def silent_s(self) -> float:
        """For how long nothing came."""
        return time.monotonic() - self.heard

    def close(self) -> None:
        """End the connection; the other side sees it."""
        self._end("closed here")
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1)

    def _end(self, why: str) -> None:
        self.lost = self.lost or why
        self._queue.put(None)

    def _read(self) -> None:
        buffer = self._rest
        while True:
            *lines, buffer = buffer.split(b"\n")
            arrived_ns = self._now_ns()
            for line in lines:
                try:
                    message = json.loads(line)
                    taken = self._soon(message, arrived_ns)
                except Exception as error:  # noqa: BLE001  whatever it is, this connection is of no use any more
                    self._end(f"{type(error).__name__}: {error}")
                    return
                if not taken:
                    self._queue.put(message)
            if len(buffer) > LONGEST:
                self._end(f"a line of more than {LONGEST} bytes")
                return
            try:
                received = self._sock.recv(1 << 18)
            except OSError as error:
                self._end(error.strerror or str(error))
                return
            if not received:
                self._end("the other side closed the connection")
                return
            self.heard = time.monotonic()
            buffer += received
