"""Becomes a program that dies with its parent: `python -I -S leash.py PARENT PROGRAM ARGS...`.

The kernel sends SIGKILL when the parent thread ends (PR_SET_PDEATHSIG, prctl(2)), so that not even the parent's own SIGKILL leaves
the program behind. A parent that died before that was set is seen by its pid.

The program is put before others on the processors where that is allowed: an emulated machine that waits for a processor keeps no time, and
what is measured in it would be the load of its host.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
NICENESS = -10
"""About ten times the share of an ordinary program (kernel/sched/core.c, sched_prio_to_weight)."""


def leashed(argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` on a leash held by this thread."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *argv]


def main(parent: int, argv: list[str]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    except PermissionError:
        sys.stderr.write(
            "not put before other programs: that takes CAP_SYS_NICE; times measured inside depend on this host's load\n"
        )
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"cannot execute {argv[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
