"""One process as /proc shows it at a moment: status, and of each thread its name, state, wait channel, kernel stack and call."""

from __future__ import annotations

import os
from collections.abc import Mapping

from dtprobe.probes.procfs import read_small

FILES = ("wchan", "stack", "syscall", "status")
"""Of each thread. `stack` needs the superuser, `syscall` the right to trace."""
MOST_THREADS = 500


def snapshot(pid: int) -> Mapping[str, object]:
    """What can be read, and for the rest why not. A process that has ended gives an error in each place."""
    threads = []
    try:
        names = sorted(os.listdir(f"/proc/{pid}/task"), key=int)  # noqa: PTH208  a path object costs more than the call
    except OSError as error:
        return {"pid": pid, "error": error.strerror}
    for name in names[:MOST_THREADS]:
        folder = f"/proc/{pid}/task/{name}"
        threads.append(
            {"tid": int(name), "name": _read(f"{folder}/comm"), **{file: _read(f"{folder}/{file}") for file in FILES}}
        )
    return {
        "pid": pid,
        "cmdline": _read(f"/proc/{pid}/cmdline").replace("\0", " "),
        "io": _read(f"/proc/{pid}/io"),
        "cgroup": _read(f"/proc/{pid}/cgroup"),
        "limits": _read(f"/proc/{pid}/limits"),
        "threads": threads,
        "left_out": max(0, len(names) - MOST_THREADS),
    }


def _read(path: str) -> str:
    try:
        return read_small(path).decode("utf-8", "replace").rstrip("\n")
    except OSError as error:
        return f"cannot be read: {error.strerror}"
