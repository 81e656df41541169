"""The socket and the server on it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from dtprobe.clock import Clock
from dtprobe.errors import UsageError
from dtprobe.serve.access import Access
from dtprobe.serve.app import application
from dtprobe.serve.live import Live

LOOPBACK = "127.0.0.1"
PORT = 8765


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where it listens: a bound socket and what to open in a browser."""

    bound: socket.socket
    host: str

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.bound.getsockname()[1]}/"


def listen(host: str, port: int) -> Address:
    """Bind; port 0 takes a free one. Raises UsageError where it is taken, or the address is not this host's."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(128)
    except (OSError, OverflowError) as error:
        bound.close()
        raise UsageError(
            f"cannot serve at {host}, port {port}: {getattr(error, 'strerror', None) or error}",
            "name a free port with --port, or 0 for any"
            if isinstance(error, OverflowError) or error.errno == 98
            else "name an address of this host",
        ) from error
    return Address(bound=bound, host=host)


def run(address: Address, out: Path, access: Access, clock: Clock, *, paths: Sequence[Path] = ()) -> None:
    """Serve until interrupted. Requests are not logged: their addresses and headers are the reader's own."""
    with closing(Live(out, clock.now_ns, paths)) as live, closing(address.bound):
        live.pages().render("index.html")  # so that the first reader need not wait for a long history
        config = uvicorn.Config(
            application(live, access),
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=3,
        )
        uvicorn.Server(config).run(sockets=[address.bound])
