"""One element of a Slurm array on its node: `python -m dtprobe.engines.batch FOLDER`, whose `<index>/task.json` says what to do.

It leaves `outcome.json` beside, unless it is interrupted. Once `task.json` is gone nobody waits for it any more, and it ends: a node
that Slurm has given up may live on.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from dtprobe.engines import Task, node
from dtprobe.interrupts import interruptible

TASK, OUTCOME, RUN, LOG = "task.json", "outcome.json", "run", "log"
INDEX = "SLURM_ARRAY_TASK_ID"


def give(task: Task, folder: Path) -> None:
    """Leave a task for the element that will find it in `folder`."""
    folder.mkdir(parents=True)
    (folder / TASK).write_text(json.dumps(asdict(task)), encoding="utf-8")


def wanted(folder: Path) -> Task | None:
    """The task that somebody still waits for."""
    try:
        found = json.loads((folder / TASK).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # cut short by the end of who wrote it: then it was never submitted
        return None
    return Task(**{**found, "argv": tuple(found["argv"])})


def main() -> None:
    folder = Path(sys.argv[1]) / os.environ[INDEX]
    task = wanted(folder)
    if task is None:
        return
    with interruptible():
        outcome = node.execute(
            task,
            folder / RUN,
            environ=os.environ,
            host=os.environ.get("SLURMD_NODENAME", ""),
            stop=lambda: not (folder / TASK).exists(),
        )
    outcome.write(folder / OUTCOME)


if __name__ == "__main__":
    main()
