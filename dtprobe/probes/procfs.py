"""Reads of /proc that several recorders share. Source of all fields: proc(5) and the kernel's filesystems/proc.rst."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from dtprobe import processes

_TICKS = os.sysconf("SC_CLK_TCK")


class Condition(NamedTuple):
    """What a process does as the kernel sees it: its main thread's state letter and the kernel function it waits in."""

    state: str
    wchan: str | None

    @property
    def stopped(self) -> bool:
        """By a signal: nothing inside it answers until SIGCONT. A tracer's short stop (state t) is not meant."""
        return self.state == "T"

    @property
    def ended(self) -> bool:
        return self.state in "ZXx"

    def __str__(self) -> str:
        return f"state {self.state}" + (f", in {self.wchan}" if self.wchan else "")


def read_small(path: str) -> bytes:
    """A /proc file in one read (they are made anew by every read, so one read is one moment). Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, 1 << 16)
    finally:
        os.close(handle)


def wchan(pid: int) -> str | None:
    """The kernel function that the main thread waits in; None where it runs, or may not be seen."""
    try:
        text = read_small(f"/proc/{pid}/wchan").decode("ascii", "replace")
    except OSError:
        return None
    return text if text not in ("", "0") else None


def wanted_seconds(pid: int) -> float | None:
    """Processor time that all its threads had so far, and that its main thread waited for; None where there is no such process.

    A process that does not get the processor that it wants is at work.
    """
    try:
        # The name may hold spaces and parentheses: it ends at the last one. Fields 14 and 15 then are the times.
        fields = read_small(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        had_s = (int(fields[11]) + int(fields[12])) / _TICKS
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        return had_s + int(read_small(f"/proc/{pid}/schedstat").split()[1]) / 1e9
    except OSError:  # a kernel without CONFIG_SCHED_INFO
        return had_s


def threads_named(pid: int, name: str) -> list[int]:
    """The ids of a process's threads of that name; none where there is no such process."""
    found = []
    try:
        for tid in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  a path object costs more than the call
            if read_small(f"/proc/{pid}/task/{tid}/comm").rstrip(b"\n") == name.encode():
                found.append(int(tid))
    except (FileNotFoundError, ProcessLookupError):
        return found
    return found


def thread_seconds(pid: int, tids: Iterable[int]) -> float | None:
    """Processor time of some threads together; None where they ended, or the kernel has no CONFIG_SCHED_INFO."""
    try:
        return sum(int(read_small(f"/proc/{pid}/task/{tid}/schedstat").split()[0]) for tid in tids) / 1e9
    except OSError:
        return None


def condition(pid: int) -> Condition | None:
    """None where there is no such process (any more)."""
    found = processes.read(pid)
    return None if found is None else Condition(found.state, wchan(pid))
