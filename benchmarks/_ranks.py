"""Starts a benchmark's own program once for each rank on this host, over loopback, and collects what they print."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence


def free_port() -> int:
    """A port of loopback that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def outputs(
    program: str, size: int, words: Sequence[str] = (), *, environ: Mapping[str, str] | None = None, timeout_s: float = 600
) -> list[str]:
    """What each of `size` ranks of `program` printed, in order of rank; ends this process where one failed."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **(environ or {}),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, program, *words], env=os.environ | common | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    try:
        printed = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        sys.exit("a rank failed")
    return printed
