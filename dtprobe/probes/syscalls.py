"""What a thread waits in, from `/proc/PID/task/TID/syscall`: a sleep and when it ends, a call to a file system, something else.

Numbers are those of the kernel's `syscall_64.tbl` and `asm-generic/unistd.h`; other machines than the two in NUMBERS give no
names, and a call without a name is nothing but a wait.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from dataclasses import dataclass

from dtprobe.probes.procfs import read_small

_X86 = """read 0 write 1 poll 7 pread64 17 pwrite64 18 readv 19 writev 20 select 23 msync 26 nanosleep 35 recvfrom 45 recvmsg 47
wait4 61 fsync 74 fdatasync 75 ftruncate 77 rename 82 mkdir 83 unlink 87 sync 162 futex 202 clock_nanosleep 230 epoll_wait 232
waitid 247 openat 257 newfstatat 262 unlinkat 263 renameat 264 pselect6 270 ppoll 271 sync_file_range 277 epoll_pwait 281
fallocate 285 preadv 295 pwritev 296 syncfs 306 renameat2 316 copy_file_range 326 statx 332"""
_ARM = """unlinkat 35 renameat 38 ftruncate 46 fallocate 47 openat 56 read 63 write 64 readv 65 writev 66 pread64 67 pwrite64 68
preadv 69 pwritev 70 pselect6 72 ppoll 73 newfstatat 79 sync 81 fsync 82 fdatasync 83 sync_file_range 84 waitid 95 futex 98
nanosleep 101 clock_nanosleep 115 epoll_pwait 22 recvfrom 207 recvmsg 212 msync 227 wait4 260 syncfs 267 renameat2 276
copy_file_range 285 statx 291"""


def _table(text: str) -> dict[int, str]:
    words = text.split()
    return {int(number): name for name, number in zip(words[::2], words[1::2], strict=True)}


NUMBERS = {"x86_64": _table(_X86), "aarch64": _table(_ARM)}

ON_DESCRIPTORS = {"read", "write", "pread64", "pwrite64", "readv", "writev", "preadv", "pwritev", "ftruncate", "fallocate"}
"""Calls to a file system where their descriptor is a regular file."""

ON_FILES = {
    *(
        "fsync",
        "fdatasync",
        "sync",
        "syncfs",
        "sync_file_range",
        "msync",
        "rename",
        "renameat",
        "renameat2",
        "unlink",
        "unlinkat",
    ),
    *("mkdir", "openat", "newfstatat", "statx", "copy_file_range"),
}
"""Calls to a file system."""

FOR_A_CHILD = {"wait4", "waitid", "read", "poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait"}
"""How a process waits for its child to end, or to write into a pipe."""

_ABSOLUTE = 1
"""TIMER_ABSTIME."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """The system call in which a thread is: its name ("" where unknown), and what matters of its arguments.

    `file`: it is a call to a file system. `sleep_s`: what is left of a sleep to a point in time, or the length of one that was
    asked for, None where this is no sleep or the length may not be read; `sleeps` tells. `interpreter`: slept by Python's own
    `time.sleep` (3.11 and later sleep to a point of the monotonic clock), which always gives the GIL back.
    """

    name: str = ""
    file: bool = False
    sleeps: bool = False
    sleep_s: float | None = None
    interpreter: bool = False

    def __str__(self) -> str:
        if self.sleeps:
            return "asleep" if self.sleep_s is None else f"asleep for {self.sleep_s:.1f} s"
        return f"in {self.name}" if self.name else "in a system call"


def call_of(pid: int, tid: int) -> Call | None:
    """The call that the thread is in; None where it runs, has ended, or may not be looked at (ptrace permission)."""
    try:
        words = read_small(f"/proc/{pid}/task/{tid}/syscall").split()
    except OSError:
        return None
    if len(words) < 7 or not words[0].lstrip(b"-").isdigit():
        return None
    name = NUMBERS.get(os.uname().machine, {}).get(int(words[0]), "")
    arguments = [int(word, 16) for word in words[1:7]]
    if name == "nanosleep":
        return Call(name=name, sleeps=True, sleep_s=_timespec(pid, arguments[0]))
    if name == "clock_nanosleep":
        return _clock_nanosleep(pid, arguments)
    file = name in ON_FILES or (name in ON_DESCRIPTORS and _regular(pid, arguments[0]))
    return Call(name=name, file=file)


def _clock_nanosleep(pid: int, arguments: list[int]) -> Call:
    clock, flags, wanted_s = arguments[0], arguments[1], _timespec(pid, arguments[2])
    absolute = bool(flags & _ABSOLUTE)
    if wanted_s is not None and absolute:
        wanted_s = (
            max(0.0, wanted_s - time.clock_gettime(clock)) if clock in (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC) else None
        )
    interpreter = absolute and clock == time.CLOCK_MONOTONIC
    return Call(name="clock_nanosleep", sleeps=True, sleep_s=wanted_s, interpreter=interpreter)


def _timespec(pid: int, address: int) -> float | None:
    try:
        handle = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            seconds, nanoseconds = struct.unpack("qq", os.pread(handle, 16, address))
        finally:
            os.close(handle)
    except (OSError, struct.error, OverflowError):
        return None
    return seconds + nanoseconds / 1e9


def _regular(pid: int, descriptor: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(f"/proc/{pid}/fd/{descriptor}").st_mode)  # noqa: PTH116  a path object costs more
    except OSError:
        return False
