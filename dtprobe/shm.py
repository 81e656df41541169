"""Shared-memory segments of a run: whose a segment is, is seen when it appears, since later nobody can tell.

torch puts the maker's pid into the name (`torch_<pid>_...`), but a maker such as a DataLoader worker may be gone long before
the run ends; NCCL, POSIX semaphores and multiprocessing put none: such a segment is the run's when one of its processes
has it open or mapped. Standard library only: the warden runs without site-packages.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtprobe import processes, undo
from dtprobe.ledger import Ledger

IN_CREATE = 0x100
EVENT_HEAD = 16
TORCH_NAME = re.compile(r"torch_(\d+)_")


class Segments:
    """Watches /dev/shm for the run of the calling process's descendants.

    `descriptor` is readable when something appeared; where the folder cannot be watched it is None and `problem` says why.
    """

    def __init__(self, run_id: str) -> None:
        self.problem: str | None = None
        self.descriptor: int | None = None
        self._run_id = run_id
        self._ours: set[int] = set()
        self._unclear: set[str] = set()
        self._tickets: dict[int | str, int] = {}
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if descriptor < 0 or libc.inotify_add_watch(descriptor, os.fsencode(undo.SHM), IN_CREATE) < 0:
            self.problem = f"{undo.SHM} is not watched, segments of the ranks may stay: {os.strerror(ctypes.get_errno())}"
            return
        self.descriptor = descriptor

    def own(self, pid: int) -> None:
        """This process is, or was, the run's: its parent is the calling process, or was when it was reaped."""
        self._ours.add(pid)

    def look(self, ledger: Ledger) -> None:
        """Journal the segments of the run that appeared since the last look, and earlier ones whose owner is known by now."""
        self._unclear.update(self._appeared())
        held = None
        for name in sorted(self._unclear):
            if not (undo.SHM / name).exists():
                self._unclear.discard(name)
            elif match := TORCH_NAME.match(name):
                pid = int(match[1])
                if (ours := self._belongs(pid)) is not None:
                    self._unclear.discard(name)
                if ours:
                    self._note(ledger, pid, {"pid": pid})
            else:
                held = self._held() if held is None else held
                if name in held:
                    self._unclear.discard(name)
                    self._note(ledger, name, {"name": name})

    def sweep(self, ledger: Ledger) -> list[str]:
        """Remove the segments of processes that have ended; what could not be removed, in words."""
        problems = []
        for what, ticket in list(self._tickets.items()):
            if isinstance(what, int) and processes.running(what):
                continue
            try:
                ledger.revert(ticket)
                del self._tickets[what]
            except undo.UndoError as error:
                problems.append(str(error))
        # Pids are used again, and what nobody claimed by now is somebody else's.
        self._ours.clear()
        self._unclear.clear()
        return problems

    def _note(self, ledger: Ledger, what: int | str, data: Mapping[str, Any]) -> None:
        if what not in self._tickets:
            self._tickets[what] = ledger.announce("shm", data)

    def _belongs(self, pid: int) -> bool | None:
        """Whether the process is the run's; None where it has ended and nobody has said so yet."""
        if pid in self._ours:
            return True
        if not (environ := processes.environ_of(pid)):
            return None
        return environ.get(processes.RUN_ID) == self._run_id

    def _held(self) -> set[str]:
        """Names of the segments that descendants of this process have open or mapped."""
        found = set()
        for one in processes.descendants(os.getpid()):
            for folder in ("fd", "map_files"):
                try:
                    links = list((processes.PROC / str(one.pid) / folder).iterdir())
                except OSError:
                    continue  # it ended, or is not ours to look into
                found |= {Path(target).name for link in links if (target := _target(link)).startswith(f"{undo.SHM}/")}
        return found

    def _appeared(self) -> list[str]:
        names: list[str] = []
        while self.descriptor is not None:
            try:
                events = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                break
            # inotify(7): struct inotify_event is wd, mask, cookie, len, then the name, padded with zeros.
            while events:
                length = int.from_bytes(events[12:16], "little")
                names.append(os.fsdecode(events[EVENT_HEAD : EVENT_HEAD + length].rstrip(b"\0")))
                events = events[EVENT_HEAD + length :]
        return names


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""
