"""Private folders that no end of a process leaves behind for long."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dtprobe.errors import UsageError

HIDDEN = ".dtprobe-postmortem-"
"""Begins the names of such folders where a user's own files lie. What is in them is no artifact of a job."""


@contextmanager
def scratch(base: Path, prefix: str) -> Iterator[Path]:
    """A private folder in `base`, removed at the end. One that a killed process left is removed by the next that comes here: who uses
    one holds a lock on it, which ends with the process.
    """
    for left in base.glob(prefix + "*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left, ignore_errors=True)
    with ExitStack() as held:
        folder = _made(base, prefix, held)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _made(base: Path, prefix: str, held: ExitStack) -> Path:
    """A new folder and its lock. Another process may take a folder for left behind before it is locked: then the next one."""
    for _ in range(20):
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        with suppress(FileNotFoundError, BlockingIOError):
            held.enter_context(_locked(folder))
            if folder.exists():
                return folder
    raise UsageError(f"no temporary folder can be kept in {base}", "set TMPDIR to a folder that is not cleaned")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock. Raises BlockingIOError where another process does, OSError where it is not ours."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
