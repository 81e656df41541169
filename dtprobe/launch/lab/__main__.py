"""`python -m dtprobe.launch.lab build`: build the image before the first run; `run PROGRAM ARGS...` runs a program in the VM."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from dtprobe.errors import DtprobeError
from dtprobe.launch.lab import Job, Share, ensure, run


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dtprobe.launch.lab", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    building = verbs.add_parser("build", help="build the image unless it is there and whole")
    building.add_argument("--mirror", help="URL of a Debian mirror; default: the one that this host's apt uses")
    running = verbs.add_parser("run", help="run a program inside, in this folder as /here (read-only)")
    running.add_argument("--out", type=Path, help="keep what it leaves in this new folder")
    running.add_argument("--timeout-s", type=float, default=300.0)
    running.add_argument("--cores", type=int, default=1)
    running.add_argument("argv", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    if asked.verb == "build":
        print(ensure(os.environ, mirror=asked.mirror).folder)
        return 0
    if not asked.argv:
        running.error("which program?")
    with tempfile.TemporaryDirectory(prefix="dtprobe-lab-") as scratch:
        job = Job(
            argv=tuple(asked.argv),
            cwd="/here",
            shares=(Share(Path.cwd(), "/here"),),
            timeout_s=asked.timeout_s,
            cores=asked.cores,
        )
        ended = run(job, out=asked.out or Path(scratch) / "job", environ=os.environ)
        for name, stream in (("stdout.log", sys.stdout), ("stderr.log", sys.stderr)):
            with (ended.out / name).open(encoding="utf-8", errors="replace") as text:
                shutil.copyfileobj(text, stream)
        return ended.status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DtprobeError as error:
        sys.exit(str(error))
