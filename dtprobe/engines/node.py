"""What happens on a node: one task in a folder of its own, bounded in time, ended whole."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dtprobe import machine
from dtprobe.engines import Done, Task

WORK = "work"
TAIL_BYTES = 64 << 10
GRACE_S = 20.0
"""From SIGTERM to SIGKILL: a run then ends its ranks and says in its folder that it was interrupted."""
TICK_S = 0.2

_OF_THE_ENGINE = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PMI_", "PMIX_", "RAY_")
_KEPT = ("SLURM_CONF",)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a task ended on its node."""

    exit_code: int | None
    stdout: str
    stderr: str
    host: str
    took_s: float
    problem: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def done(self, task: Task, attempts: int) -> Done:
        return Done(task=task.id, attempts=attempts, **asdict(self))

    def write(self, file: Path) -> None:
        """Whole or not at all."""
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.rename(file)

    @classmethod
    def read(cls, file: Path) -> Outcome:
        return cls(**json.loads(file.read_text(encoding="utf-8")))


def plain(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an engine tells its own tasks: a scenario that saw it would take itself for a rank of that job.

    Ray sets OMP_NUM_THREADS to the task's processors (ray/_private/worker.py), which would outlast it in the scenario's ranks.
    """
    kept = {key: value for key, value in environ.items() if key in _KEPT or not key.startswith(_OF_THE_ENGINE)}
    if any(key.startswith("RAY_") for key in environ):
        kept.pop("OMP_NUM_THREADS", None)
    return kept


def execute(
    task: Task,
    folder: Path,
    *,
    environ: Mapping[str, str],
    host: str = "",
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run the task in `<folder>/work/`; what it says goes to files beside. `stop` is asked all the time: once true, the task is ended.

    An exception (a signal of ours) ends the task before it passes through.
    """
    work = folder / WORK
    work.mkdir(parents=True)
    command = [sys.executable, "-m", "dtprobe.engines.held", str(os.getpid()), *task.argv]
    began = time.monotonic()
    problem = ""
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=work, env=plain(environ), start_new_session=True
        )
        try:
            while process.poll() is None:
                if stop():
                    problem = "it was stopped"
                elif time.monotonic() - began > task.timeout_s:
                    problem = f"it ran past its {task.timeout_s:g} s"
                if problem:
                    break
                _wait(process, TICK_S)
        finally:
            end(process)
    return Outcome(
        exit_code=None if problem else process.returncode,
        stdout=tail(folder / "stdout"),
        stderr=tail(folder / "stderr"),
        host=host or socket.gethostname(),
        took_s=round(time.monotonic() - began, 3),
        problem=problem,
        versions={"python": platform.python_version(), **machine.versions(("dtprobe", "torch", "numpy"))},
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a task, first as an interrupt does, then for good with all of its session's group. Nothing where it has ended already."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    if not _wait(process, GRACE_S):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(file: Path, size: int = TAIL_BYTES) -> str:
    """The last `size` bytes of a file as text."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - size))
        return stream.read().decode("utf-8", "replace")


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
