"""Whether a rank that others wait for is at work, by what the kernel shows of its process and all that descend from it.

Work is processor time, bytes read, written or sent, a call to a file system, or a sleep that ends by itself. A rank without
any of them is blocked; one that was stopped, or has ended, cannot come at all. Threads that torch runs for communication are left
out: gloo's loop wakes a hundred times a second whatever happens, and the worker server works when it is asked.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from dtprobe import processes
from dtprobe.probes.procfs import read_small, wchan
from dtprobe.probes.syscalls import FOR_A_CHILD, Call, call_of

RUNTIME = ("gloo_tcp", "pt_gloo", "pt_workerserver", "pt_tcpstore", "pt_nccl")
"""Beginnings of the names of torch's own communication threads."""
BUSY = 0.05
"""A rank that uses this share of a core is at work; polling for something that never comes uses less."""
STARVED = 0.5
"""So does one whose threads wait for a processor for this share of the time, with one of them ready to run."""
BYTES_PER_S = 4096
"""A rank that moves as much is at work; heartbeats of monitors and stores move less."""
SHORTEST_S = 0.4
"""Rates over less than this say nothing."""
POLL_S = 1.0
"""Sleeps of native code shorter than this are polling: torch's FileStore sleeps 10 ms between two looks."""


class Life(StrEnum):
    WORKS = "works"
    FILES = "files"
    SLEEPS = "sleeps"
    BLOCKED = "blocked"
    STOPPED = "stopped"
    ENDED = "ended"


DEAD = (Life.STOPPED, Life.ENDED)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rank does.

    `quiet_s`: since when no progress was seen, a sleep counted as progress; `idle_s`: not counted. `sleep_s`: how long it still
    sleeps, where that is known (of a `native_sleep` only how long it was asked for).
    """

    life: Life
    text: str
    quiet_s: float = 0.0
    idle_s: float = 0.0
    sleep_s: float | None = None
    native_sleep: bool = False

    @property
    def dead(self) -> bool:
        return self.life in DEAD

    @property
    def alive(self) -> bool:
        """It goes on by itself."""
        return self.life in (Life.WORKS, Life.FILES, Life.SLEEPS)


class Thread(NamedTuple):
    state: str
    cpu_ns: int
    wait_ns: int
    call: Call | None


@dataclass(frozen=True)
class Sample:
    """A rank's process tree at one moment: threads by (pid, tid), bytes by pid."""

    at: float
    state: str
    wchan: str | None
    threads: dict[tuple[int, int], Thread]
    moved: dict[int, int]
    tree: tuple[int, ...]


@dataclass
class Pulse:
    """One rank under observation: `look` again and again, `finding` is the last answer."""

    pid: int
    start: int | None = None
    last: Sample | None = None
    active_at: float | None = None
    worked_at: float = 0.0
    sent: dict[int, int] = field(default_factory=dict)
    sent_at: float | None = None
    finding: Finding | None = None
    ran: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Of each thread of the rank itself: its processor time at the last look, and when that was last seen to grow."""

    def thread_quiet_s(self, tid: int, now: float) -> float:
        """For how long the thread has not run; 0 for one that is not known."""
        return now - self.ran[tid][1] if tid in self.ran else 0.0

    def look(self, now: float) -> Finding:
        """Sample the process, compare with the look before, and say what it does."""
        known = processes.read(self.pid)
        if self.start is None and known is not None:
            self.start = known.start
        if known is None or known.ended or known.start != self.start:
            self.finding = Finding(life=Life.ENDED, text="has ended")
            return self.finding
        current = sample(self.pid, now)
        self._note_threads(current)
        before = self.last
        if self.active_at is None:
            self.active_at = self.worked_at = now
        worked = ""
        if before is None or current.at - before.at >= SHORTEST_S:
            self.last = current
            worked = _worked(before, current) if before is not None else ""
        elif self.finding is not None and self.finding.life is Life.WORKS:
            worked = self.finding.text
        if worked:
            self.active_at = self.worked_at = now
        found = _finding(current, worked, now - self.active_at, self.pid)
        if found.life in (Life.FILES, Life.SLEEPS):
            self.active_at = now
        if found.life is Life.FILES:
            self.worked_at = now
        self.finding = replace(found, idle_s=now - self.worked_at)
        return self.finding

    def _note_threads(self, current: Sample) -> None:
        ran = {}
        for (owner, tid), one in current.threads.items():
            if owner == self.pid:
                before = self.ran.get(tid)
                ran[tid] = before if before is not None and before[0] == one.cpu_ns else (one.cpu_ns, current.at)
        self.ran = ran

    def sockets(self, moved: dict[int, int], now: float) -> None:
        """Bytes that each process moved over its TCP connections so far; enough since the last time is progress."""
        if self.last is None:
            return
        mine = {pid: moved[pid] for pid in self.last.tree if pid in moved}
        if self.sent_at is not None and now - self.sent_at >= SHORTEST_S:
            rate = sum(max(0, size - self.sent.get(pid, size)) for pid, size in mine.items()) / (now - self.sent_at)
            if rate >= BYTES_PER_S and self.finding is not None and self.finding.life is Life.BLOCKED:
                self.active_at = self.worked_at = now
                self.finding = Finding(life=Life.WORKS, text=f"moves {rate / 1024:.0f} KiB/s over TCP")
        self.sent, self.sent_at = mine, now


def sample(pid: int, now: float) -> Sample:
    """All threads of the process and its descendants as they are now; what vanishes meanwhile is left out."""
    threads: dict[tuple[int, int], Thread] = {}
    moved: dict[int, int] = {}
    tree, ahead = [], [pid]
    while ahead:
        one = ahead.pop()
        tree.append(one)
        ahead += [child for child in _threads(one, threads) if child not in tree]
        moved[one] = _moved(one)
    known = processes.read(pid)
    return Sample(now, known.state if known else "X", wchan(pid), threads, moved, tuple(tree))


def _threads(pid: int, found: dict[tuple[int, int], Thread]) -> list[int]:
    """Add the process's threads but torch's own; answers its children."""
    children: list[int] = []
    try:
        names = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208  a path object costs more than the call
    except OSError:
        return children
    for name in names:
        folder = f"/proc/{pid}/task/{name}"
        children += _children(folder)
        try:
            head, _, tail = read_small(f"{folder}/stat").rpartition(b")")
            if head.partition(b"(")[2].decode("utf-8", "replace").startswith(RUNTIME):
                continue
            cpu, waited = (int(word) for word in read_small(f"{folder}/schedstat").split()[:2])
        except (OSError, ValueError):
            continue
        found[pid, int(name)] = Thread(tail.split()[0].decode("ascii"), cpu, waited, call_of(pid, int(name)))
    return children


def _children(folder: str) -> list[int]:
    try:
        return [int(word) for word in read_small(f"{folder}/children").split()]
    except OSError:  # the thread has ended, or the kernel is without CONFIG_PROC_CHILDREN: then only the rank itself is seen
        return []


def _moved(pid: int) -> int:
    """Bytes through read and write so far, of files, pipes and (what gloo sends) sockets; 0 where it may not be seen."""
    try:
        fields = dict(line.split(b": ") for line in read_small(f"/proc/{pid}/io").splitlines())
        return int(fields[b"rchar"]) + int(fields[b"wchar"])
    except (OSError, KeyError, ValueError):
        return 0


def _worked(before: Sample, now: Sample) -> str:
    """What of the time between two samples was work, in words; empty for none."""
    lasted_s = now.at - before.at
    cpu_s = (
        sum(one.cpu_ns - (before.threads[key].cpu_ns if key in before.threads else 0) for key, one in now.threads.items()) / 1e9
    )
    if cpu_s >= BUSY * lasted_s:
        return f"computes ({100 * cpu_s / lasted_s:.0f} % of a core)"
    waits = [(one, before.threads[key]) for key, one in now.threads.items() if key in before.threads and one.state == "R"]
    waited_s = max(((one.wait_ns - old.wait_ns) / 1e9 for one, old in waits), default=0.0)
    if waited_s >= STARVED * lasted_s:
        return f"waits for a processor ({100 * waited_s / lasted_s:.0f} % of the time)"
    moved = sum(size - before.moved[pid] for pid, size in now.moved.items() if pid in before.moved)
    if moved >= BYTES_PER_S * lasted_s:
        return f"reads or writes ({moved / lasted_s / 1024:.0f} KiB/s)"
    return ""


def _finding(now: Sample, worked: str, quiet_s: float, pid: int) -> Finding:
    frozen = now.wchan is not None and ("refrigerator" in now.wchan or "freez" in now.wchan)
    if now.state == "T" or frozen:
        return Finding(life=Life.STOPPED, text="frozen by its cgroup" if frozen else "stopped (state T)", quiet_s=quiet_s)
    if worked:
        return Finding(life=Life.WORKS, text=worked)
    for (owner, _), one in now.threads.items():
        if one.state == "D" or (one.call is not None and one.call.file):
            whose = "" if owner == pid else f" in its child {owner}"
            what = f" ({one.call.name})" if one.call is not None and one.call.name else ""
            return Finding(life=Life.FILES, text=f"waits for a file system or device{what}{whose}")
    main = now.threads.get((pid, pid))
    if main is None or main.state == "R":
        return Finding(life=Life.WORKS, text="runs")
    call = main.call
    if call is not None and call.sleeps and not _polls(call):
        return Finding(life=Life.SLEEPS, text=str(call), sleep_s=call.sleep_s, native_sleep=not call.interpreter)
    if call is not None and call.name in FOR_A_CHILD:
        for (owner, tid), one in now.threads.items():
            if owner != pid and owner == tid and one.call is not None and one.call.sleeps and not _polls(one.call):
                return Finding(life=Life.SLEEPS, text=f"waits for its child {owner}, {one.call}", sleep_s=one.call.sleep_s)
    where = f"blocked {call or 'in ' + (now.wchan or 'a wait')}" if call is None or not call.sleeps else "polls in native code"
    return Finding(life=Life.BLOCKED, text=f"{where}, no progress for {quiet_s:.0f} s", quiet_s=quiet_s)


def _polls(call: Call) -> bool:
    return not call.interpreter and call.sleep_s is not None and call.sleep_s < POLL_S
