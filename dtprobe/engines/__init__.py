"""Commands of dtprobe spread over an engine that exists already: Slurm, Ray, or the processes of this machine.

`named("slurm:partition=main", os.environ).run(tasks, into=folder, ended=...)`. What a task leaves comes back to `<into>/<task's id>/`,
whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dtprobe.errors import Unavailable, UsageError

NAMES = ("local", "ray", "slurm")

ATTEMPTS = 3
"""How often a task is begun at most: it may be what takes its nodes down."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One command of dtprobe, to be run once, somewhere, in an empty folder of its own."""

    id: str
    """Unique among the tasks of one spread, and fit for the name of a file."""
    argv: tuple[str, ...]
    """Without the interpreter (`run NAME --json`): the engine puts its node's own `python -m dtprobe` before."""
    timeout_s: float
    brings: str = ""
    """Name of a folder below the task's own whose content comes back to `<into>/<id>/`; nothing where empty or where there is none."""
    alone: bool = False
    """No other task may run on the same node beside it."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a task ended. `exit_code` is None where there is none to tell; `problem` then says why."""

    task: str
    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    """The last 64 KiB of each."""
    host: str = ""
    attempts: int = 1
    took_s: float = 0.0
    problem: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of Python, dtprobe, torch and numpy on the node that ran it."""


class Engine(Protocol):
    """What runs tasks."""

    @property
    def name(self) -> str: ...

    def probe(self) -> Unavailable | None:
        """Why nothing can be run on it, with the remedy."""

    def run(self, tasks: Sequence[Task], *, into: Path, ended: Callable[[Done], None]) -> None:
        """Run them all. Each ends exactly once in `ended`, in the caller's thread, also when its node vanished: it is run elsewhere then.

        An interrupt (SIGINT, SIGTERM, an exception of `ended`) ends what runs and passes through. Raises DtprobeError where the engine
        cannot be reached, UsageError for tasks that cannot be.
        """


def named(text: str, environ: Mapping[str, str]) -> Engine:
    """The engine that `name` or `name:option=value,...` means; UsageError for another name or an option that it does not know."""
    name, _, rest = text.partition(":")
    options = _options(text, rest)
    if name == "local":
        from dtprobe.engines.local import Local

        return Local.of(options, environ)
    if name == "ray":
        from dtprobe.engines.ray import Ray

        return Ray.of(options, environ)
    if name == "slurm":
        from dtprobe.engines.slurm import Slurm

        return Slurm.of(options, environ)
    raise UsageError(f"no engine is called {name!r}", f"there are {', '.join(NAMES)}")


def check(tasks: Sequence[Task]) -> None:
    """Raises UsageError for tasks whose ids are not unique or no names of files, and for what would come from elsewhere than their folders."""
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen or not task.id or task.id.startswith(".") or {"/", "\0"} & set(task.id):
            raise UsageError(f"task {task.id!r}: ids are to be unique, and fit for the names of files", "rename it")
        seen.add(task.id)
        if Path(task.brings).is_absolute() or ".." in Path(task.brings).parts:
            raise UsageError(f"task {task.id}: {task.brings} does not lie in its own folder", "give a path relative to it")


def _options(text: str, rest: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in rest.split(",") if rest else ():
        key, _, value = part.partition("=")
        if not key or key in found:
            raise UsageError(f"--on {text}: {part!r} is no option", "write name:key=value,key=value")
        found[key] = value
    return found
