"""A rank has less of something: memory, processor time, cores, open files, locked memory, shared memory, processes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from dtprobe import doctor, processes
from dtprobe.catalog import load_module
from dtprobe.errors import Unavailable
from dtprobe.inject import Firing, Injection, Injector, Site
from dtprobe.inject.entered import EnteredInjection, Entry
from dtprobe.inject.ranks import Seen, Watch
from dtprobe.inject.spec import Fault
from dtprobe.probes import RankProcess
from dtprobe.processes import Identity

HERE = Path(__file__).resolve().parent
groups = load_module(HERE / "groups.py", "_dtprobe_injector_resource_groups")

How = Literal["any", "cgroup", "rlimit"]
PAGE = resource.getpagesize()
CAP_IPC_LOCK = 14
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def size(text: str) -> int:
    """Bytes of `64M`, `1.5G`, `4096`. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text, re.IGNORECASE)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"limit={text} is no size: write 64M, 1.5G or bytes")
    return int(float(found[1]) * UNITS[found[2].upper()])


@dataclass(frozen=True, kw_only=True)
class Memory:
    """At most so much memory: the kernel kills in the group (cgroup), or allocations fail (rlimit: RLIMIT_DATA)."""

    limit: str
    by: How = "any"

    def __post_init__(self) -> None:
        size(self.limit)


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """At most so many cores' worth of processor time (0.2 is a fifth of one)."""

    cores: float

    def __post_init__(self) -> None:
        if not 0.01 <= self.cores <= 1024:
            raise ValueError(f"cores={self.cores:g} is not between 0.01 and 1024")


@dataclass(frozen=True, kw_only=True)
class Cpuset:
    """Only these cores (several: 0+1): by cgroup, else by the affinity of each thread."""

    cpus: tuple[int, ...]
    by: Literal["any", "cgroup", "affinity"] = "any"

    def __post_init__(self) -> None:
        if missing := set(self.cpus) - os.sched_getaffinity(0):
            raise ValueError(f"cpus={'+'.join(map(str, sorted(missing)))} cannot be used here")


@dataclass(frozen=True, kw_only=True)
class Nofile:
    """At most so many open files (the soft RLIMIT_NOFILE): further ones fail with EMFILE."""

    limit: int

    def __post_init__(self) -> None:
        _positive(self.limit)


@dataclass(frozen=True, kw_only=True)
class Memlock:
    """At most so much locked memory: pinning fails, as RDMA registration does. Root loses CAP_IPC_LOCK, which would pass it by."""

    limit: str

    def __post_init__(self) -> None:
        size(self.limit)


@dataclass(frozen=True, kw_only=True)
class Shm:
    """A /dev/shm of its own of that size, as in a container's default of 64M. Ranks no longer share theirs with others."""

    limit: str

    def __post_init__(self) -> None:
        if size(self.limit) < PAGE:
            raise ValueError(f"limit={self.limit} is less than a page ({PAGE} bytes)")


@dataclass(frozen=True, kw_only=True)
class Pids:
    """At most so many processes and threads: further ones fail with EAGAIN."""

    limit: int
    by: How = "any"

    def __post_init__(self) -> None:
        _positive(self.limit)


def _positive(limit: int) -> None:
    if limit < 1:
        raise ValueError(f"limit={limit} is less than 1")


class LimitInjection(Injection):
    """A limit on processes that run: a control group that they join, or a soft limit or affinity that is set from outside."""

    def __init__(self, fault: Fault, site: Site) -> None:
        self.fault = fault
        self.site = site
        self._watch = Watch(site, fault.target, self._limit, again=True, whole=True)
        self._fired: list[Firing] = []
        self._groups: dict[int | None, groups.Group] = {}  # type: ignore[name-defined]
        self._undo: list[tuple[int | None, Callable[[], None]]] = []
        self._held_to: set[Identity] = set()
        self._done: set[Identity] = set()
        own = hashlib.sha256(str(site.folder).encode()).hexdigest()[:8]
        self._name = f"dtprobe-{site.box.run_id}-{own}-{site.index}"

    def check(self) -> Unavailable | None:
        config = self.fault.config
        by = getattr(config, "by", "any")
        if isinstance(config, Nofile) or by in ("rlimit", "affinity"):
            return self._check_rlimit()
        place = groups.place(self._name, self.fault.action)
        if isinstance(place, Path):
            return None
        return place if by == "cgroup" or isinstance(config, Cpu) else self._check_rlimit(place)

    def _check_rlimit(self, instead_of: Unavailable | None = None) -> Unavailable | None:
        if isinstance(self.fault.config, Pids) and os.geteuid() == 0:
            also = f"; {instead_of}" if instead_of else ""
            return Unavailable(f"the kernel does not hold root to RLIMIT_NPROC{also}", "by=cgroup, or not as root")
        return None

    def start(self, held: Sequence[RankProcess]) -> None:
        """Who is held is limited before its program begins; whoever comes later, when it is seen."""
        if self.fault.target.after_s is None:
            for one in held:
                meant = self.fault.target.rank is None if one.rank is None else self.fault.target.hits(one.rank)
                if meant and (who := processes.identity(one.pid)):
                    self._limit(Seen(one.rank, who, 0.0, one.folder))
        self._watch.start(held)

    def stop(self) -> tuple[Firing, ...]:
        self._watch.stop()
        for rank, group in self._groups.items():
            if effect := group.effect():
                self._say(rank, effect)
        self._lift(None, everyone=True)
        return tuple(sorted(self._fired, key=lambda one: one.t_ns))

    def problems(self) -> tuple[str, ...]:
        return tuple(self._watch.problems)

    def _limit(self, seen: Seen) -> None:
        if seen.who in self._done:
            return
        self._done.add(seen.who)
        how = self._by_group(seen) or self._by_affinity(seen) or self._by_rlimit(seen)
        self._fired.append(Firing(t_ns=self.site.clock.now_ns(), rank=seen.rank, detail=how))
        if self.fault.target.for_s is not None:
            self._watch.later(self.fault.target.for_s, lambda: self._lift(seen.rank))

    def _by_group(self, seen: Seen) -> str:
        """By a group of its own; empty where that is not asked for, or cannot be had here."""
        config = self.fault.config
        if isinstance(config, Nofile) or getattr(config, "by", "any") in ("rlimit", "affinity"):
            return ""
        path = groups.place(f"{self._name}-{'all' if seen.rank is None else seen.rank}", self.fault.action)
        if isinstance(path, Unavailable):
            return ""
        if seen.rank not in self._groups:
            self._groups[seen.rank] = groups.Group(self.site.box, path, self.fault.action, self._amount())
        group = self._groups[seen.rank]
        group.join(seen.who.pid)
        return f"{group.set} in {path}"

    def _amount(self) -> str:
        match self.fault.config:
            case Memory(limit=limit):
                return str(size(limit))
            case Cpu(cores=cores):
                return str(cores)
            case Cpuset(cpus=cpus):
                return ",".join(map(str, cpus))
            case Nofile(limit=limit) | Pids(limit=limit):
                return str(limit)
        raise AssertionError(self.fault.action)

    def _by_affinity(self, seen: Seen) -> str:
        if not isinstance(self.fault.config, Cpuset):
            return ""
        for pid in _tree(seen.who.pid):
            for task in (processes.PROC / str(pid) / "task").iterdir():
                thread = processes.identity(int(task.name))
                if thread is not None:
                    self._undo.append((seen.rank, partial(_set_affinity, thread, os.sched_getaffinity(thread.pid))))
                    _set_affinity(thread, set(self.fault.config.cpus))
        return f"affinity {self._amount()} of every thread; later threads inherit it and may change it"

    def _by_rlimit(self, seen: Seen) -> str:
        """The soft limit: it can be raised again without a privilege, also by the program itself."""
        which, name = RLIMITS[type(self.fault.config)]
        wanted = int(self._amount())
        for pid in _tree(seen.who.pid):
            who = processes.identity(pid)
            if who is None or who in self._held_to:
                continue
            self._held_to.add(who)
            soft, hard = resource.prlimit(pid, which)
            self._undo.append((seen.rank, partial(_set_rlimit, who, which, (soft, hard))))
            _set_rlimit(who, which, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
        return f"{name} {wanted}, soft, for the process and what it starts"

    def _lift(self, rank: int | None, *, everyone: bool = False) -> None:
        """Nobody is held back any longer; the groups themselves go with the run."""
        for key, group in self._groups.items():
            if everyone or key == rank:
                group.lift()
        for key, undo in self._undo:
            if everyone or key == rank:
                undo()
        now_ns = self.site.clock.now_ns()
        self._fired = [
            replace(one, ended_ns=now_ns) if one.ended_ns is None and (everyone or one.rank == rank) else one
            for one in self._fired
        ]

    def _say(self, rank: int | None, effect: str) -> None:
        self._fired = [replace(one, detail=f"{one.detail}; {effect}") if one.rank == rank else one for one in self._fired]


RLIMITS: Mapping[type, tuple[int, str]] = {
    Memory: (resource.RLIMIT_DATA, "RLIMIT_DATA"),
    Nofile: (resource.RLIMIT_NOFILE, "RLIMIT_NOFILE"),
    Pids: (resource.RLIMIT_NPROC, "RLIMIT_NPROC"),
}


def _set_rlimit(who: Identity, which: int, limits: tuple[int, int]) -> None:
    """Of exactly this process, if it lives."""
    if who.alive():
        resource.prlimit(who.pid, which, limits)


def _set_affinity(thread: Identity, cpus: set[int]) -> None:
    if thread.alive():
        os.sched_setaffinity(thread.pid, cpus)


def _tree(pid: int) -> list[int]:
    return [pid, *(one.pid for one in processes.descendants(pid))]


class ConfinedInjection(EnteredInjection):
    """What must be there before the program starts: a small program in front makes it and then becomes the program."""

    def __init__(self, fault: Fault, site: Site) -> None:
        super().__init__(fault, site)
        config = fault.config
        assert isinstance(config, Memlock | Shm)
        self._bytes = size(config.limit)
        how = "RLIMIT_MEMLOCK, no CAP_IPC_LOCK" if fault.action == "memlock" else "tmpfs in a mount namespace of its own"
        plan = json.dumps({fault.action: self._bytes})
        self.entry = Entry(
            front=(sys.executable, "-I", "-S", str(HERE / "confined.py"), plan),
            detail=f"{fault.action} {self._bytes} bytes by {how}",
        )

    def check(self) -> Unavailable | None:
        target, action = self.fault.target, self.fault.action
        for key in ("after_s", "for_s"):
            if getattr(target, key) is not None:
                return Unavailable(f"resource:{action} is there from the start to the end", f"leave {key} out")
        if action == "shm" and os.geteuid() != 0:
            return Unavailable("a mount on /dev/shm needs root", "start it as root")
        return doctor.capability("mount") if action == "shm" else None

    def took(self, pid: int, rank: int | None) -> bool:
        folder = processes.PROC / str(pid)
        try:
            if self.fault.action == "shm":
                mounts = (folder / "mountinfo").read_text(encoding="utf-8", errors="replace")
                return any(
                    " /dev/shm " in line and line.split(" - ")[1].split()[1] == "dtprobe" for line in mounts.splitlines()
                )
            effective = re.search(r"^CapEff:\s+([0-9a-f]+)$", (folder / "status").read_text(), re.MULTILINE)
            free = effective is not None and int(effective[1], 16) >> CAP_IPC_LOCK & 1
            return not free and resource.prlimit(pid, resource.RLIMIT_MEMLOCK)[0] == self._bytes
        except OSError:
            return False


def make(fault: Fault, site: Site) -> Injection:
    return (ConfinedInjection if fault.action in ("memlock", "shm") else LimitInjection)(fault, site)


injector = Injector(
    name="resource",
    layer="process",
    title="ranks have less memory, processor time, cores, open files, locked memory, shared memory or processes",
    certifies_not="A machine that is short of it as a whole: other ranks, the launcher and the kernel have what they had.",
    needs=("linux",),
    actions={
        "memory": Memory,
        "cpu": Cpu,
        "cpuset": Cpuset,
        "nofile": Nofile,
        "memlock": Memlock,
        "shm": Shm,
        "pids": Pids,
    },
    targets=("rank", "after_s", "for_s"),
    make=make,
)
