"""The TCP connections of one gloo group, and how to cut them.

gloo has no abort: a collective whose peer never comes blocks its caller, and the end of the group, until its timeout, and a
signal is served only then. It does react at once to the end of a connection. So a group notes which connections it opened, and
`cut` ends exactly those, from any thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


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
    ends = {descriptor: _ends(descriptor) for descriptor in found.sockets}
    found.ports = [end.local for end in ends.values() if end is not None and end.remote is None]


@dataclass(frozen=True)
class Wires:
    """Connections of one group in this process: descriptor -> inode of the socket it had when the group was made."""

    sockets: dict[int, str]

    @classmethod
    def among(cls, opened: Opened, peer_ports: Iterable[int]) -> Wires:
        """Of what was opened, the connections accepted at our ports or made to one of the peers'."""
        theirs, ours = set(peer_ports), set(opened.ports)
        ends = {descriptor: _ends(descriptor) for descriptor in opened.sockets}
        return cls(
            {
                descriptor: opened.sockets[descriptor]
                for descriptor, end in ends.items()
                if end is not None and end.remote is not None and (end.local in ours or end.remote in theirs)
            }
        )

    def cut(self) -> int:
        """Let the connections that are still the same end; how many. Whoever waits on them fails at once, here and there."""
        count = 0
        for descriptor, inode in self.sockets.items():
            with contextlib.suppress(OSError):  # gone, or not connected any more: what we want
                if _link(descriptor) != inode:
                    continue
                with socket.socket(fileno=os.dup(descriptor)) as wire:
                    # Reading alone: gloo then meets the end of file and closes. Where a write fails first, gloo forgets its message,
                    # and who waits for that waits for the whole timeout.
                    wire.shutdown(socket.SHUT_RD)
                    count += 1
        return count


@dataclass(frozen=True)
class _Ends:
    """The ports of a TCP socket; `remote` is None where it listens."""

    local: int
    remote: int | None


def _ends(descriptor: int) -> _Ends | None:
    """None for what is no TCP socket, neither listens nor is connected, or has gone."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as wire:
        if wire.family not in (socket.AF_INET, socket.AF_INET6) or wire.type != socket.SOCK_STREAM:
            return None
        listens = wire.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return _Ends(wire.getsockname()[1], None if listens else wire.getpeername()[1])
    return None


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
