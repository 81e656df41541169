"""A program that is measured as a whole process: its time, its memory, its words."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """What one process took."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    code: int
    out: str


def ran(command: list[str]) -> Run:
    """Start it, wait for its end; standard error is dropped."""
    with tempfile.TemporaryFile("w+") as out:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, process.returncode, out.read())
