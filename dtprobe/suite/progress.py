"""How far a night is, in a file that is whole at every instant: for whoever watches it, and for going on after it was killed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.store.files import read_json, write_json

SCHEMA = "dtprobe.progress/1"
FILE = "progress.json"

Step = tuple[str, int]
"""A scenario's id, and which of its runs in this night, from 0."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a night was asked for: enough to go on with it."""

    steps: tuple[Step, ...]
    seed: int
    repeats: int | None
    runs: int
    jobs: int
    retries: int
    left_out: Mapping[str, str]
    because: Mapping[str, str]
    world_size: int | None = None
    launcher: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "steps": [list(one) for one in self.steps]}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Asked:
        return cls(**{**data, "steps": tuple((str(name), int(number)) for name, number in data["steps"])})


class Progress:
    """The file of one night, written anew at every change."""

    def __init__(self, folder: Path, asked: Asked, began_ns: int, done: Sequence[Mapping[str, Any]] = ()) -> None:
        self._path = folder / FILE
        self._asked = asked
        self._began_ns = began_ns
        self._running: dict[Step, None] = {}
        self.done: dict[Step, Mapping[str, Any]] = {(one["scenario"], one["number"]): one for one in done}
        self._ended = False
        self._write()

    def started(self, step: Step) -> None:
        self._running[step] = None
        self._write()

    def ended(self, step: Step, told: Mapping[str, Any]) -> None:
        """`told` is the run as the summary has it."""
        self._running.pop(step, None)
        self.done[step] = told
        self._write()

    def end(self) -> None:
        self._running.clear()
        self._ended = True
        self._write()

    def _write(self) -> None:
        me = psutil.Process()
        write_json(
            self._path,
            {
                "schema": SCHEMA,
                "began_ns": self._began_ns,
                "ended": self._ended,
                "pid": me.pid,
                "pid_began": me.create_time(),
                "total": len({*self._asked.steps, *self.done, *self._running}),
                "asked": self._asked.as_json(),
                "running": [list(step) for step in self._running],
                "done": list(self.done.values()),
            },
        )


def read(folder: Path) -> dict[str, Any]:
    """The progress of the night in a folder; raises UsageError where there is none, DtprobeError where it is damaged."""
    path = folder / FILE
    if not path.is_file():
        raise UsageError(
            f"{folder} is no night that could be resumed: it has no {FILE}", "name a folder below suites/, or latest"
        )
    data = read_json(path)
    if data.get("schema") != SCHEMA:
        raise DtprobeError(f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA!r}")
    return data


def alive(data: Mapping[str, Any]) -> bool:
    """Whether the process that wrote it still lives; a pid that was given to another process since does not count."""
    if data["ended"]:
        return False
    try:
        return abs(psutil.Process(data["pid"]).create_time() - data["pid_began"]) < 1.0
    except psutil.NoSuchProcess:
        return False


def resumable(out: Path, said: str) -> Path:
    """The folder of the night that `--resume SAID` means: `latest`, an id, or a folder. Raises UsageError."""
    nights = out / "suites"
    if said == "latest":
        found = sorted(path.parent for path in nights.glob(f"*/{FILE}"))
        if not found:
            raise UsageError(f"--resume latest: {nights} holds no night", "start one without --resume")
        return found[-1]
    for folder in (Path(said), nights / said):
        if folder.is_dir():
            return folder
    known = sorted((path.name for path in nights.iterdir()), reverse=True)[:3] if nights.is_dir() else []
    raise UsageError(
        f"--resume {said}: no such night", f"there are {', '.join(known)}" if known else "start one without --resume"
    )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep the night for this process, until it ends by whatever end; raises UsageError where another one has it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{folder.name} is being run by another process", "wait for its end, or end it") from None
        except OSError:
            pass  # NFS locks no folders; there the pid in progress.json alone tells
        yield
    finally:
        os.close(handle)
