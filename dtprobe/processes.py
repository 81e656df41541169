"""Processes as /proc shows them: who descends from whom, which run a process belongs to, and signals that hit only it.

Standard library only: the warden runs without site-packages.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

RUN_ID = "DTPROBE_RUN_ID"
"""Environment variable of every process of a run: the run's id."""

HARNESS = "DTPROBE_HARNESS"
"""Environment variable of every process of a run: `<pid>.<start>.<pid namespace>` of the harness that owns it."""

WARDEN = "DTPROBE_WARDEN"
"""Environment variable of every process of a run but its warden: `<pid>.<start>` of the warden."""

PROC = Path("/proc")


class Process(NamedTuple):
    """One process at one moment. `start` is in clock ticks since boot: with `pid` it names a process for good."""

    pid: int
    ppid: int
    state: str
    session: int
    start: int
    name: str

    @property
    def ended(self) -> bool:
        """Dead, though its parent may not have waited for it yet."""
        return self.state in "ZXx"


class Identity(NamedTuple):
    """A process across time: a pid is used again, its start time with it is not."""

    pid: int
    start: int

    def alive(self) -> bool:
        found = read(self.pid)
        return found is not None and found.start == self.start and not found.ended

    def at_work(self) -> bool:
        """Alive, and not stopped by a signal or a tracer."""
        found = read(self.pid)
        return self.alive() and found is not None and found.state not in "Tt"


def read(pid: int) -> Process | None:
    """The process, or None where there is none (any more). Source of the fields: proc(5), `/proc/PID/stat`."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes().decode("utf-8", "replace")
    except OSError:
        return None
    # The name may hold spaces and parentheses: it ends at the last one.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if len(fields) < 20:
        return None
    return Process(pid, int(fields[1]), fields[0], int(fields[3]), int(fields[19]), head.partition("(")[2])


def running(pid: int) -> bool:
    """Whether a process of that pid runs; one that ended and was not waited for does not."""
    found = read(pid)
    return found is not None and not found.ended


def identity(pid: int) -> Identity | None:
    """The lasting name of a running process, or None where there is none."""
    found = read(pid)
    return None if found is None else Identity(pid, found.start)


def everything() -> dict[int, Process]:
    """All processes that this pid namespace shows, by pid."""
    found = {}
    for entry in os.scandir(PROC):
        if entry.name.isdigit() and (one := read(int(entry.name))) is not None:
            found[one.pid] = one
    return found


def descendants(of: int) -> list[Process]:
    """Children, their children and so on, parents before children: who is killed in this order can fork no further."""
    children: dict[int, list[Process]] = {}
    for one in everything().values():
        children.setdefault(one.ppid, []).append(one)
    found: list[Process] = []
    layer = [of]
    while layer:
        grown = [child for parent in layer for child in children.pop(parent, ())]
        found += grown
        layer = [child.pid for child in grown]
    return found


def ancestors(of: int) -> set[int]:
    """The process itself, its parent, its parent's parent and so on."""
    found: set[int] = set()
    while of > 0 and of not in found:
        found.add(of)
        one = read(of)
        of = one.ppid if one else 0
    return found


def environ_of(pid: int) -> Mapping[str, str]:
    """The environment that the process was started with; empty where it may not be read or the process is gone."""
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(item).partition("=") for item in raw.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def marked(run_id: str | None = None) -> list[tuple[Process, Mapping[str, str]]]:
    """Running processes that carry a run's marker (that run's, or any's where `run_id` is None), with their environment."""
    found = []
    for one in everything().values():
        if one.ended:
            continue
        environ = environ_of(one.pid)
        if RUN_ID in environ and run_id in (None, environ[RUN_ID]):
            found.append((one, environ))
    return found


def marker(run_id: str, harness: Identity, warden: Identity | None = None) -> dict[str, str]:
    """The variables that mark a process as a run's; the warden's own lack the one that names it."""
    named = {WARDEN: f"{warden.pid}.{warden.start}"} if warden else {}
    return {RUN_ID: run_id, HARNESS: f"{harness.pid}.{harness.start}.{pid_namespace()}", **named}


def pid_namespace() -> int:
    """The number of this process's pid namespace: pids mean nothing in another."""
    return (PROC / "self/ns/pid").stat().st_ino


def send(who: Identity, signum: int) -> bool:
    """Signal exactly this process, never one that took over its pid; False where it has ended.

    Raises PermissionError where the process belongs to somebody else.
    """
    try:
        handle = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return False
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return _send_without_pidfd(who, signum)
    try:
        # Only now is the identity compared: the handle keeps naming the process that had the pid when it was opened.
        found = read(who.pid)
        if found is None or found.start != who.start:
            return False
        signal.pidfd_send_signal(handle, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _send_without_pidfd(who: Identity, signum: int) -> bool:
    """For kernels before 5.3 and sandboxes: the check and the signal are two steps, a microsecond apart."""
    found = read(who.pid)
    if found is None or found.start != who.start:
        return False
    try:
        os.kill(who.pid, signum)
    except ProcessLookupError:
        return False
    return True


def end(targets: Callable[[], Iterable[Process]], *, within_s: float, reap: Callable[[], None] = lambda: None) -> list[Process]:
    """SIGKILL what `targets` answers, again and again, until it answers nothing that runs; what is left after `within_s`.

    SIGKILL also ends stopped processes. What stays is in an uninterruptible call (state D), or not ours to signal.
    """
    give_up = time.monotonic() + within_s
    pause_s = 0.001
    while True:
        reap()
        left = [one for one in targets() if not one.ended]
        if not left:
            reap()  # who has ended since
            return []
        for one in left:
            try:
                send(Identity(one.pid, one.start), signal.SIGKILL)
            except PermissionError:
                continue  # it stays in what is returned
        if time.monotonic() > give_up:
            return left
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)


def describe(one: Process) -> str:
    """A process in words, for messages."""
    return f"process {one.pid} ({one.name}, state {one.state})"
