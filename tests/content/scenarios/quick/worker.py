"""A worker without torch: counts up, leaks a shared-memory segment and a daemon when told to, or behaves badly on purpose."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from dtprobe import record


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--behave", choices=("well", "raise", "daemon", "hang"), default="well")
    options = parser.parse_args()
    if options.behave == "daemon":
        Path(f"/dev/shm/torch_{os.getpid()}_1_0").write_bytes(b"left")
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    started = time.perf_counter()
    for step in range(options.steps):
        time.sleep(options.step_s)
        record("step", value=float(step), duration_s=options.step_s)
    record("work", duration_s=time.perf_counter() - started)
    if options.behave == "raise":
        raise RuntimeError("the worker fails as it was told to")
    while options.behave == "hang":
        time.sleep(0.1)


main()
