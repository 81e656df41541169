"""One question to one of the machine's programs, bounded in time."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from dtprobe.errors import Unavailable


def output(argv: tuple[str, ...], environ: Mapping[str, str], *, package: str = "", timeout_s: float) -> str | Unavailable:
    """What the program printed, or why there is nothing: it is not installed (`package` has it), failed, or took too long."""
    program = shutil.which(argv[0], path=environ.get("PATH"))
    if program is None:
        return Unavailable(f"there is no {argv[0]}", f"install {package}" if package else "")
    try:
        done = subprocess.run(
            [program, *argv[1:]],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Unavailable(f"{argv[0]} did not answer in {timeout_s:g} s")
    if done.returncode != 0:
        return Unavailable(f"{argv[0]} failed: {' '.join(done.stderr.split())[:200]}")
    return done.stdout
