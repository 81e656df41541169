"""NCCL's RAS subsystem, where a job has it: what the library says of its communicators, asked on localhost.

A line protocol (NCCL 2.24 and later, `NCCL_RAS_ADDR`, port 28028 by default; measured with 2.28). All ranks of a host share the port and a
stopped one may get the connection, so one silence means nothing: it is asked several times. RAS counts calls of each kind per communicator;
it does not see send and receive, nor roots, and one answer cannot tell a slow rank from one that hangs.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from dtprobe.errors import Unavailable

ADDRESS = "NCCL_RAS_ADDR"
PORT = 28028
TRIES = 4
ANSWER_S = 2.0
QUESTION = b"CLIENT PROTOCOL 2\nTIMEOUT 2\nVERBOSE STATUS\n"
MOST_BYTES = 1 << 20


def ask(environ: Mapping[str, str]) -> str | Unavailable:
    """RAS's report, as it says it."""
    host, _, port = environ.get(ADDRESS, "").rpartition(":")
    where = (host or "localhost", int(port) if port.isdigit() else PORT)
    why = ""
    for _ in range(TRIES):
        try:
            with socket.create_connection(where, timeout=ANSWER_S) as connection:
                connection.sendall(QUESTION)
                answer = b""
                while len(answer) < MOST_BYTES and (part := connection.recv(1 << 16)):
                    answer += part
            if answer:
                return answer.decode("utf-8", "replace")
            why = "it closed the connection"
        except ConnectionRefusedError:
            return Unavailable(
                f"nothing listens on {where[0]}:{where[1]}: no rank here uses NCCL 2.24 or later with RAS enabled"
            )
        except OSError as error:
            why = str(error)
    return Unavailable(f"NCCL RAS on {where[0]}:{where[1]} did not answer {TRIES} times: {why}")
