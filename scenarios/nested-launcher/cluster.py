"""A Slurm of two nodes on this host, for as long as one `srun` takes: `python cluster.py TASKS PROGRAM ARGS...`, as root.
PROGRAM is a file beside this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from dtprobe.errors import DtprobeError
from dtprobe.launch.slurm import cluster


def main() -> None:
    tasks, program, *args = sys.argv[1:]
    program = str(Path(__file__).with_name(program))
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, cluster(Path(folder)) as told:
        command = ["srun", f"--ntasks={tasks}", "--nodes=2", "--kill-on-bad-exit=0", sys.executable, program, *args]
        ended = subprocess.run(command, env=os.environ | told, check=False)
    sys.exit(ended.returncode)


if __name__ == "__main__":
    try:
        main()
    except DtprobeError as error:
        sys.exit(str(error))
