"""Runs dtprobe's command line, and interrupts it when its parent ends: `python -m dtprobe.engines.held PARENT ARGS...`.

The kernel sends SIGTERM when the parent thread ends (PR_SET_PDEATHSIG, prctl(2)), so that not even the SIGKILL of an engine's worker
leaves a scenario behind. A parent that died before that was set is seen by its pid.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
    sys.argv = ["dtprobe", *sys.argv[2:]]
    from dtprobe.__main__ import main as dtprobe

    dtprobe()


if __name__ == "__main__":
    main()
