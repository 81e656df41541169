"""Asks the worker server that torch runs inside a rank: HTTP over a unix socket, answered from C++ threads."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TypeVar

Key = TypeVar("Key")

NCCL = "dump_nccl_trace_json"
HANDLERS = ("fr_trace_json", NCCL)
"""Flight recorders that a server may offer: torch's general one (2.10 and later), and that of its NCCL backend, which keeps
its own records. Both without stack traces."""


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def handlers(path: Path, timeout_s: float) -> tuple[str, ...] | None:
    """Which of HANDLERS the server offers; None where it does not answer."""
    answer = _finish(_begin(path, "GET", "/handler/", timeout_s))
    if answer is None:
        return None
    offered = json.loads(answer)
    return tuple(name for name in HANDLERS if name in offered)


def ask_all(asked: Mapping[Key, tuple[Path, str]], timeout_s: float, monotonic: Callable[[], float]) -> dict[Key, bytes | None]:
    """Ask several servers at once, each (socket, handler); within `timeout_s` all together. None: no answer."""
    give_up = monotonic() + timeout_s
    begun = {}
    for key, (path, handler) in asked.items():
        begun[key] = _begin(path, "POST", f"/handler/{handler}", max(0.01, give_up - monotonic()))
    return {key: _finish(one, max(0.01, give_up - monotonic())) for key, one in begun.items()}


def _begin(path: Path, method: str, target: str, timeout_s: float) -> HTTPConnection | None:
    connection = _UnixConnection(path, timeout_s)
    try:
        # http.client says Content-Length: 0 by itself; without it the server waits 5 s for a body.
        connection.request(method, target, headers={"Connection": "close"})
    except OSError:
        connection.close()
        return None
    return connection


def _finish(connection: HTTPConnection | None, timeout_s: float | None = None) -> bytes | None:
    if connection is None:
        return None
    try:
        if timeout_s is not None and connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        answer = connection.getresponse()
        return answer.read() if answer.status == 200 else None
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()
