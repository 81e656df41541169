"""The protocol of NCCL's RAS against a stand-in server: none of NCCL's is to be had without a GPU."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from dtprobe.errors import Unavailable
from dtprobe.probes import ras


@pytest.fixture
def stand_in() -> Iterator[Callable[[list[bytes]], tuple[dict[str, str], list[bytes]]]]:
    """Answers one connection after the other with these texts; what it was asked is in the list."""
    servers: list[tuple[socket.socket, threading.Thread]] = []

    def start(answers: list[bytes]) -> tuple[dict[str, str], list[bytes]]:
        server, asked = socket.create_server(("127.0.0.1", 0)), list[bytes]()

        def serve() -> None:
            for answer in answers:
                try:
                    one, _ = server.accept()
                except OSError:
                    return
                with one:
                    asked.append(one.recv(1 << 12))
                    one.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        servers.append((server, thread))
        return {ras.ADDRESS: f"127.0.0.1:{server.getsockname()[1]}"}, asked

    yield start
    for server, thread in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def test_it_is_asked_again_when_a_stopped_rank_got_the_connection(stand_in):
    environ, asked = stand_in([b"", b"", b"NCCL version 2.28.9\nOK\n"])
    assert ras.ask(environ) == "NCCL version 2.28.9\nOK\n"
    assert len(asked) == 3 and asked[0] == ras.QUESTION


def test_silence_and_a_closed_port_are_told_apart(stand_in):
    environ, _ = stand_in([b""] * ras.TRIES)
    silent = ras.ask(environ)
    assert isinstance(silent, Unavailable) and f"did not answer {ras.TRIES} times" in silent.reason
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    closed = ras.ask({ras.ADDRESS: f"127.0.0.1:{port}"})
    assert isinstance(closed, Unavailable) and f"nothing listens on 127.0.0.1:{port}" in closed.reason
