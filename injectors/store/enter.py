"""In front of a rank's program: asks the proxy for a port, writes it to MASTER_ADDR and MASTER_PORT, becomes the program.

`python -I -S enter.py FOLDER SOCKET LOG INDEX PROGRAM...`; where it cannot, it says why in the log, and the program sees the store as it is.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

ANSWER_S = 30.0


def through_proxy(folder: str, name: str, environ: dict[str, str]) -> str | None:
    """Points the environment at the proxy; why it cannot, else None."""
    rank = environ.get("RANK", "")
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "")
    if not rank.isdigit() or not address or not port.isdigit():
        return "RANK, MASTER_ADDR and MASTER_PORT are not all set: the rank finds its store in another way"
    if rank == "0" and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return "rank 0 is the store's own host: it binds the port that it connects to"
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder)
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(ANSWER_S)
            channel.connect(name)
            channel.sendall((json.dumps({"rank": int(rank), "address": address, "port": int(port)}) + "\n").encode())
            answer = json.loads(channel.makefile().readline())
    except (OSError, ValueError) as error:
        return f"the proxy does not answer: {error}"
    finally:
        os.fchdir(here)
        os.close(here)
    environ["MASTER_ADDR"], environ["MASTER_PORT"] = answer["address"], str(answer["port"])
    return None


def main(folder: str, name: str, log: str, index: str, *argv: str) -> None:
    environ = dict(os.environ)
    problem = through_proxy(folder, name, environ)
    if problem:
        who = f"rank {environ.get('RANK', '?')}"
        line = {"kind": "refused", "t_ns": time.time_ns(), "index": int(index), "detail": f"{who}: {problem}"}
        with open(log, "a", encoding="utf-8") as file:  # noqa: PTH123  pathlib is slow to load
            file.write(json.dumps(line) + "\n")
    try:
        os.execvpe(argv[0], argv, environ)
    except OSError as error:
        sys.exit(f"cannot execute {argv[0]}: {error.strerror}")


if __name__ == "__main__":
    main(*sys.argv[1:])
