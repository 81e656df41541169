"""Tasks as arrays of Slurm jobs, through Slurm's own commands and a folder that its nodes share.

The folder is `<into>/.slurm/`. A task of a node that vanished is submitted again, elsewhere; whichever of its jobs is through first
counts, and the others are ended. An interrupt cancels the jobs. After a SIGKILL of ours they are bounded by `--time`, and the next
spread into the same folder goes on with them: what it wants too it waits for, the rest it cancels.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dtprobe.engines import ATTEMPTS, Done, Task, batch, check, node
from dtprobe.engines.local import bring
from dtprobe.engines.slurm_commands import Commands, Element, Key
from dtprobe.errors import DtprobeError, Unavailable, UsageError
from dtprobe.interrupts import interruptible

SPOOL = ".slurm"
ARRAY = 500
"""Elements of one array at most: MaxArraySize is 1001 unless the cluster says otherwise (slurm.conf(5))."""
CPUS = 2
"""Processors of a task unless `cpus-per-task` is given: the smallest scenarios have two ranks."""
TICK_S = 0.5
ASK_S = 2.0
SETTLE_S = 15.0
"""From the end of a job to when its files must be seen here: NFS keeps attributes for up to 60 s, a folder listed anew shows them sooner."""
SILENT_S = 300.0
"""So long slurmctld may be away; jobs go on without it, and their outcomes are seen."""
ENDED_S = 60.0
"""So long cancelled jobs are waited for: Slurm's KillWait is 30 s."""

_AGAIN = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "")
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "REVOKED", *_AGAIN)
_OURS = ("array", "chdir", "job-name", "ntasks", "nodes", "open-mode", "output", "parsable", "requeue", "wait", "wrap")


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """`options` go to sbatch as they are: `partition=main` as `--partition=main`, `exclusive` as `--exclusive`."""

    options: Mapping[str, str]
    environ: Mapping[str, str]

    @classmethod
    def of(cls, options: Mapping[str, str], environ: Mapping[str, str]) -> Slurm:
        for key in options:
            if key in _OURS or not re.fullmatch("[a-z][a-z-]+", key):
                raise UsageError(
                    f"--on slurm: {key} is not yours to set", "write long options of sbatch: partition=main,time=30"
                )
        return cls(options=options, environ=environ)

    @property
    def name(self) -> str:
        return "slurm"

    def probe(self) -> Unavailable | None:
        return Commands(self.environ).probe()

    def run(self, tasks: Sequence[Task], *, into: Path, ended: Callable[[Done], None]) -> None:
        """As Engine.run says. `into` is to be shared by the nodes."""
        check(tasks)
        commands = Commands(self.environ)
        if (unavailable := commands.probe()) is not None:
            raise UsageError(f"--on slurm: {unavailable.reason}", unavailable.remedy)
        into = into.resolve()
        into.mkdir(parents=True, exist_ok=True)
        with interruptible(), _held(into / SPOOL):
            spread = _Spread(self, commands, into, {task.id: _Open(task) for task in tasks}, ended)
            try:
                spread.run()
            except BaseException:
                spread.cancel()
                raise
            spread.finish()

    def arguments(self, tasks: Sequence[Task]) -> list[str]:
        """Options of sbatch for an array of these tasks, which are all `alone` or none is."""
        minutes = math.ceil((max(task.timeout_s for task in tasks) + node.GRACE_S) / 60) + 1
        given = {"time": str(minutes), "cpus-per-task": str(CPUS), **self.options}
        if tasks[0].alone:
            given["exclusive"] = ""
        return [f"--{key}={value}" if value else f"--{key}" for key, value in given.items()]


@dataclass
class _Open:
    """A task that has not ended, and the elements that it was given to."""

    task: Task
    tries: list[Key] = field(default_factory=list)
    over_since: float | None = None


class _Spread:
    """One spread: what is open, and the arrays that it was given to."""

    def __init__(
        self, engine: Slurm, commands: Commands, into: Path, tasks: dict[str, _Open], ended: Callable[[Done], None]
    ) -> None:
        self._engine = engine
        self._commands = commands
        self._into = into
        self._spool = into / SPOOL
        self._open = tasks
        self._ended = ended
        self._token = ""
        self._heard = time.monotonic()

    def run(self) -> None:
        self._adopt()
        self._submit([one for one in self._open.values() if not one.tries])
        asked = -math.inf
        while self._open:
            for one in list(self._open.values()):
                self._collect(one)
            if time.monotonic() - asked > ASK_S and self._open:
                asked = time.monotonic()
                self._look()
            if self._open:
                time.sleep(TICK_S)

    def cancel(self) -> None:
        """End all that runs; the folder is kept where Slurm does not take it, for the next spread to see."""
        for file in self._spool.glob(f"*/*/{batch.TASK}"):
            file.unlink(missing_ok=True)
        names = self._names()
        if not names:
            self.finish()
        elif self._commands.cancel(f"--name={','.join(names)}"):
            give_up = time.monotonic() + ENDED_S
            while self._alive():
                if time.monotonic() > give_up:
                    return
                time.sleep(TICK_S)
            self.finish()

    def finish(self) -> None:
        shutil.rmtree(self._spool, ignore_errors=True)  # a job that was given up may still write into it

    def _adopt(self) -> None:
        """Go on with the jobs of a spread that was killed."""
        token = self._spool / "token"
        if not token.exists():
            token.write_text(secrets.token_hex(4), encoding="utf-8")
        self._token = token.read_text(encoding="utf-8")
        unwanted = []
        for file in sorted(self._spool.glob(f"*/*/{batch.TASK}")):
            key = self._key(file.parent)
            task = batch.wanted(file.parent)
            if task is not None and task.id in self._open and self._open[task.id].task == task:
                self._open[task.id].tries.append(key)
            else:
                file.unlink()
                unwanted.append(key)
        self._drop(unwanted)

    def _submit(self, some: Sequence[_Open]) -> None:
        for alone in (False, True):
            alike = [one for one in some if one.task.alone is alone]
            for part in (alike[at : at + ARRAY] for at in range(0, len(alike), ARRAY)):
                number = len(self._arrays())
                folder = self._spool / str(number)
                for index, one in enumerate(part):
                    batch.give(one.task, folder / str(index))
                    one.tries.append((self._name(number), index))
                    one.over_since = None
                command = [sys.executable, "-m", "dtprobe.engines.batch", str(folder)]
                options = self._engine.arguments([one.task for one in part])
                self._commands.submit(self._name(number), len(part), folder, command, options)

    def _collect(self, one: _Open) -> bool:
        """End a task of which an element is through."""
        for key in one.tries:
            folder = self._folder(key)
            if (folder / batch.OUTCOME).exists():
                outcome = node.Outcome.read(folder / batch.OUTCOME)
                bring(one.task, folder / batch.RUN / node.WORK, self._into)
                self._end(one, outcome.done(one.task, len(one.tries)))
                return True
        return False

    def _end(self, one: _Open, done: Done) -> None:
        self._ended(done)
        del self._open[one.task.id]
        for key in one.tries:
            (self._folder(key) / batch.TASK).unlink(missing_ok=True)
        if len(one.tries) > 1:
            self._drop(one.tries)

    def _look(self) -> None:
        """What Slurm says of the open tasks: those whose node vanished are submitted again, those that cannot end well end."""
        states = self._commands.states(self._names())
        now = time.monotonic()
        if states is None:
            if now - self._heard > SILENT_S:
                raise DtprobeError(f"Slurm's controller has not answered for {SILENT_S:g} s", "look at `scontrol ping`")
            return
        self._heard = now
        again = []
        for one in list(self._open.values()):
            key = one.tries[-1]
            seen = states.get(key) or Element("", "")
            if seen.state not in _OVER:
                one.over_since = None
                continue
            one.over_since = one.over_since or now
            settled = seen.state in _AGAIN[:3] or now - one.over_since > SETTLE_S
            list(self._folder(key).iterdir())  # makes NFS look again
            if self._collect(one) or not settled:
                continue
            if not seen.state:
                seen = self._commands.accounted(self._names()).get(key) or seen
            if seen.state in _AGAIN and len(one.tries) < ATTEMPTS:
                again.append(one)
            else:
                self._end(one, self._lost(one, seen))
        self._submit(again)

    def _lost(self, one: _Open, seen: Element) -> Done:
        folder = self._folder(one.tries[-1])
        log = folder / batch.LOG
        words = node.tail(log).strip().splitlines() if log.exists() else []
        said = f"Slurm's job {seen.id or one.tries[-1][0]} ended as {seen.state or 'nobody knows'}"
        if len(one.tries) > 1:
            said += f", begun {len(one.tries)} times"
        if words:
            said += f": {words[-1]}"
        elif not log.exists() and seen.state not in ("CANCELLED", *_AGAIN):
            said += f"; it left nothing in {folder}: do the nodes share it?"
        return Done(task=one.task.id, exit_code=None, host=seen.node, attempts=len(one.tries), problem=said)

    def _drop(self, keys: Sequence[Key]) -> None:
        """Cancel what Slurm still has of these elements."""
        states = (self._commands.states(sorted({name for name, _ in keys})) or {}) if keys else {}
        if ids := [states[key].id for key in keys if key in states and states[key].state not in _OVER]:
            self._commands.cancel(*ids)

    def _alive(self) -> bool:
        states = self._commands.states(self._names())
        return states is None or any(one.state not in _OVER for one in states.values())

    def _arrays(self) -> list[int]:
        return sorted(int(path.name) for path in self._spool.iterdir() if path.name.isdecimal())

    def _names(self) -> list[str]:
        return [self._name(number) for number in self._arrays()]

    def _name(self, number: int) -> str:
        return f"dtprobe-{self._token}-{number}"

    def _folder(self, key: Key) -> Path:
        name, index = key
        return self._spool / name.rpartition("-")[2] / str(index)

    def _key(self, folder: Path) -> Key:
        return self._name(int(folder.parent.name)), int(folder.name)


@contextmanager
def _held(spool: Path) -> Iterator[None]:
    """One spread at a time uses the folder."""
    lock = os.open(spool.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{spool.parent} is in use by another spread", "wait for it, or give another folder") from None
        spool.mkdir(exist_ok=True)
        yield
    finally:
        os.close(lock)
