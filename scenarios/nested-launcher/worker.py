"""A task of an outer launcher (srun, mpirun, a Kubernetes Job), which starts torchrun for one rank.

With `--meet` the torchruns of all tasks meet at one address. Without it each is told of one node, its own, as in a single-node tutorial.

By hand: `JOB_COMPLETION_INDEX=0 python worker.py --task-var JOB_COMPLETION_INDEX --tasks 2`, and the same once more with 1
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from dtprobe import record

OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What the harness's own launcher says; the outer launcher stands in its place."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task-var", required=True, help="the variable in which the outer launcher counts its tasks")
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--meet", action="store_true")
    parser.add_argument("--resolve", action="store_true", help="ranks ask dtprobe.framework.bootstrap for their place first")
    args = parser.parse_args()
    task = int(os.environ[args.task_var])
    port = os.environ.get("MASTER_PORT", "29500")
    how = ["--standalone"]
    if args.meet:
        how = [f"--nnodes={args.tasks}", f"--node-rank={task}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    rank = [str(Path(__file__).with_name("rank.py")), "--task", str(task), "--tasks", str(args.tasks)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=1",
        *how,
        *rank,
        *(["--resolve"] if args.resolve else []),
    ]
    environ = {name: value for name, value in os.environ.items() if name not in OURS}
    ended = subprocess.run(command, env=environ, check=False)
    record("task", task=task, exit_code=ended.returncode)
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
