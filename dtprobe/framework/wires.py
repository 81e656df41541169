"""The TCP connections of one gloo group, and how to cut them.

gloo has no abort: a collective whose peer never comes blocks its caller, and the end of the group, until its timeout, and a
signal is served only then. It does react at once to a closed connection. So a group notes which connections it opened, and
`cut` shuts exactly those down, from any thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass
class Opened:
    """Sockets that appeared in this process during `watch`: descriptor -> inode, and the ports that were listened on."""

    sockets: dict[int, str] = field(default_factory=dict)
    ports: list[int] = field(default_factory=list)


@contextlib.contextmanager
def watch() -> Iterator[Opened]:
    """Note the sockets opened in the block; other threads' too, which `Wires.among` sorts out."""
    before = set(_sockets().items())
    found = Opened()
    yield found
    found.sockets = dict(set(_sockets().items()) - before)
    found.ports = [
        connection.laddr.port
        for connection in psutil.Process().net_connections("tcp")
        if connection.fd in found.sockets and connection.status == psutil.CONN_LISTEN
    ]


@dataclass(frozen=True)
class Wires:
    """Connections of one group in this process: descriptor -> inode of the socket it had when the group was made."""

    sockets: dict[int, str]

    @classmethod
    def among(cls, opened: Opened, peer_ports: Iterable[int]) -> Wires:
        """Of what was opened, the connections accepted at our ports or made to one of the peers'."""
        theirs, ours = set(peer_ports), set(opened.ports)
        if not opened.sockets:
            return cls({})
        return cls(
            {
                connection.fd: opened.sockets[connection.fd]
                for connection in psutil.Process().net_connections("tcp")
                if connection.fd in opened.sockets
                and connection.raddr
                and (connection.laddr.port in ours or connection.raddr.port in theirs)
            }
        )

    def cut(self) -> int:
        """Shut the connections that are still the same down; how many. Whoever waits on them fails at once, here and there."""
        count = 0
        for descriptor, inode in self.sockets.items():
            with contextlib.suppress(OSError):  # gone, or not connected any more: what we want
                if _link(descriptor) != inode:
                    continue
                with socket.socket(fileno=os.dup(descriptor)) as wire:
                    wire.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count


def _sockets() -> dict[int, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, as is the one that lists the folder
            link = _link(int(entry.name))
            if link.startswith("socket:"):
                found[int(entry.name)] = link
    return found


def _link(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())
