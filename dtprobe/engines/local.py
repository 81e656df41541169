"""The engine that is always there: processes of this machine, so many at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from dtprobe.engines import Done, Task, check, node
from dtprobe.errors import Unavailable, UsageError
from dtprobe.interrupts import interruptible


@dataclass(frozen=True, kw_only=True)
class Local:
    """Runs `jobs` tasks at a time; those that want to be alone come last, one after another."""

    jobs: int
    environ: Mapping[str, str]

    @classmethod
    def of(cls, options: Mapping[str, str], environ: Mapping[str, str]) -> Local:
        for key, value in options.items():
            if key != "jobs" or not value.isdecimal() or int(value) < 1:
                raise UsageError(f"--on local: no option {key}={value}", "write local:jobs=4")
        return cls(jobs=int(options.get("jobs", max(2, (os.cpu_count() or 1) // 2))), environ=environ)

    @property
    def name(self) -> str:
        return "local"

    def probe(self) -> Unavailable | None:
        return None

    def run(self, tasks: Sequence[Task], *, into: Path, ended: Callable[[Done], None]) -> None:
        """As Engine.run says."""
        check(tasks)
        into.mkdir(parents=True, exist_ok=True)
        stop = threading.Event()
        spool = Path(tempfile.mkdtemp(prefix=".local-", dir=into))

        def execute(task: Task) -> Done:
            folder = spool / task.id
            outcome = node.execute(task, folder, environ=self.environ, stop=stop.is_set)
            bring(task, folder / node.WORK, into)
            return outcome.done(task, 1)

        try:
            for some, jobs in (([one for one in tasks if not one.alone], self.jobs), ([one for one in tasks if one.alone], 1)):
                with interruptible(), ThreadPoolExecutor(jobs) as pool:
                    running: list[Future[Done]] = [pool.submit(execute, task) for task in some]
                    try:
                        for future in as_completed(running):
                            ended(future.result())
                    except BaseException:
                        stop.set()
                        pool.shutdown(cancel_futures=True)
                        raise
        finally:
            shutil.rmtree(spool)


def bring(task: Task, work: Path, into: Path) -> None:
    """Move what a task left into its place, on the same file system: in one step, so that it is there whole or not at all."""
    left, place = work / task.brings, into / task.id
    if not task.brings or not left.is_dir():
        return
    if place.exists():
        shutil.rmtree(place)
    left.rename(place)
