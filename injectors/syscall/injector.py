"""System calls that fail, return something else, come late or are hit by a signal: by strace, or by a filter in the kernel."""

from __future__ import annotations

import errno as errnos
import json
import re
import signal as signals
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from dtprobe import doctor, processes
from dtprobe.catalog import load_module
from dtprobe.doctor import Missing
from dtprobe.errors import Unavailable, UsageError
from dtprobe.inject import Firing, Injection, Injector, Site
from dtprobe.inject.entered import EnteredInjection, Entry
from dtprobe.inject.inrank import Plan
from dtprobe.inject.ranks import Seen, Watch
from dtprobe.inject.spec import Fault
from dtprobe.probes import RankProcess
from dtprobe.processes import Identity

HERE = Path(__file__).resolve().parent
filtered = load_module(HERE / "filtered.py", "_dtprobe_injector_syscall_filtered")
traced = load_module(HERE / "traced.py", "_dtprobe_injector_syscall_traced")

ATTACHED_WITHIN_S = 10.0
DETACHED_WITHIN_S = 5.0
COST = "attached from outside, without seccomp-bpf: every call of the rank takes 33 to 63 us more"


def _check(call: Sequence[str], error: str | None = None) -> None:
    for name in call:
        if not re.fullmatch(r"[a-z_][a-z0-9_]*", name):
            raise ValueError(f"call={name} is no name of a system call")
    if error is not None and not hasattr(errnos, error):
        raise ValueError(f"error={error} is no name as in errno(3)")


class _Traced(Protocol):
    """What the actions by strace share: which calls, and whether only those on a path."""

    @property
    def call(self) -> tuple[str, ...]: ...

    @property
    def path(self) -> str | None: ...

    def words(self) -> str:
        """What strace does, in its own words."""


@dataclass(frozen=True, kw_only=True)
class Error:
    """The calls (several: read+pread64) fail with `error` and are not executed; `path`: only those on this file."""

    call: tuple[str, ...]
    error: str = "EIO"
    path: str | None = None

    def __post_init__(self) -> None:
        _check(self.call, self.error)

    def words(self) -> str:
        return f"error={self.error}"


@dataclass(frozen=True, kw_only=True)
class Retval:
    """The calls return `value` and are not executed: a write that was never done, a read of nothing (0)."""

    call: tuple[str, ...]
    value: int
    path: str | None = None

    def __post_init__(self) -> None:
        _check(self.call)
        if not 0 <= self.value < 1 << 63:
            raise ValueError(f"value={self.value} is negative: that is what syscall:error is for")

    def words(self) -> str:
        return f"retval={self.value}"


@dataclass(frozen=True, kw_only=True)
class Signal:
    """The thread gets `signal` at the call, which is executed. Every call of the rank then takes 33 to 63 us more."""

    call: tuple[str, ...]
    signal: str
    path: str | None = None

    def __post_init__(self) -> None:
        _check(self.call)
        if not re.fullmatch(r"SIG[A-Z0-9]+", self.signal) or not hasattr(signals, self.signal):
            raise ValueError(f"signal={self.signal} is no name as in signal(7)")

    def words(self) -> str:
        return f"signal={self.signal}"


@dataclass(frozen=True, kw_only=True)
class Delay:
    """The calls come `seconds` late (`at=enter`), or their results do (`at=exit`)."""

    call: tuple[str, ...]
    seconds: float
    at: Literal["enter", "exit"] = "enter"
    path: str | None = None

    def __post_init__(self) -> None:
        _check(self.call)
        if not 0 < self.seconds <= 3600:
            raise ValueError(f"seconds={self.seconds:g} is not between 0 and 3600")

    def words(self) -> str:
        return f"delay_{self.at}={round(self.seconds * 1_000_000)}"


@dataclass(frozen=True, kw_only=True)
class Errno:
    """Every such call fails with `error`, by a filter in the kernel: no tracer, no cost, no end before the process's own."""

    call: tuple[str, ...]
    error: str = "ENOSYS"

    def __post_init__(self) -> None:
        _check(self.call, self.error)


class TracedInjection(EnteredInjection):
    """strace in front of the rank's program, where it can be; else attached to the running rank."""

    def __init__(self, fault: Fault, site: Site) -> None:
        super().__init__(fault, site)
        self._config: _Traced = fault.config  # type: ignore[assignment]
        self._late = fault.target.after_s is not None
        self._others = Plan(site, "syscall", Path())
        self._watch = Watch(site, fault.target, self._attach)
        self._tracers: dict[int, tuple[subprocess.Popen[bytes], Identity]] = {}
        self._front: set[int | None] = set()
        self._words: tuple[str, ...] = ()
        self._unmet: list[str] = []

    def check(self) -> Unavailable | None:
        if missing := doctor.capability("strace"):
            return missing
        when = traced.when(self.fault.target)
        if isinstance(when, Unavailable):
            return when
        config, calls = self._config, ",".join(self._config.call)
        trial = subprocess.run(
            ["strace", "-o", "/dev/null", "-e", f"trace={calls}", "true"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if trial.returncode != 0:
            return Unavailable(trial.stderr.strip().splitlines()[-1], "strace and the kernel of this machine name the calls")
        inject = f"inject={calls}:{config.words()}" + (f":when={when}" if when else "")
        path = ("-P", config.path) if config.path else ()
        self._words = ("-q", "-f", "-ttt", "-y", *path, "-e", f"trace={calls}", "-e", inject, "-o", "{folder}/strace.txt")
        # strace 6.1 with --seccomp-bpf says nothing and sends no signal.
        cheap = () if isinstance(config, Signal) or doctor.capability("strace-seccomp") else ("--seccomp-bpf",)
        self.entry = Entry(front=("strace", "-D", *cheap, *self._words, "--"), detail=f"strace {inject}")
        return None

    def prepare(self) -> None:
        mine = self.fault.target.rank
        for other in self._others.parts():
            if mine is None or other["rank"] is None or set(mine) & set(other["rank"]):
                raise UsageError(
                    f"faults {str(self.fault)!r} and {other['fault']!r} both trace a rank, and a process has one tracer",
                    "aim them at different ranks, join calls (call=read+write), or use syscall:errno for one",
                )
        self._others.write({"rank": mine, "fault": str(self.fault)})
        super().prepare()

    def whole(self) -> bool:
        return super().whole() and not self._late

    def in_ranks(self) -> bool:
        """Where the whole command is traced, its ranks are."""
        return not self._late and self.fault.target.rank is not None

    def _meant(self, rank: int | None) -> bool:
        return not self._late and super()._meant(rank)

    def wrap(self, rank: int | None, argv: tuple[str, ...]) -> tuple[str, ...]:
        if self._meant(rank):
            self._front.add(rank)
        return super().wrap(rank, argv)

    def took(self, pid: int, rank: int | None) -> bool:
        return _tracer(pid) != 0

    def start(self, held: Sequence[RankProcess]) -> None:
        super().start(held)
        self._watch.start(held)

    def stop(self) -> tuple[Firing, ...]:
        self._watch.stop()
        for pid in [one.pid for one in self.site.processes()]:
            self._detach(pid)
        for tracer, _ in self._tracers.values():
            _ended(tracer)
        self._others.remove()
        super().stop()
        ranks = {one.pid: one.rank for one in self.site.processes()}
        signal = self.fault.config.signal if isinstance(self.fault.config, Signal) else None
        found: list[Firing] = []
        for file in sorted(self.site.folder.glob("*/strace.txt")):
            name = re.fullmatch(r"rank(\d+)", file.parent.name)
            rank = int(name[1]) if name else None
            if self.fault.target.rank is None if rank is None else self.fault.target.hits(rank):
                fired = list(traced.firings(file, rank, ranks, signal))
                if not fired:
                    most = traced.most_in_one_thread(file)
                    self._unmet.append(
                        f"{file.parent.name}: no thread made more than {most} of these calls (each name counted alone)"
                    )
                found += fired
        attached = {who.pid for _, who in self._tracers.values()}
        found = [replace(one, detail=f"{one.detail}, {COST}") if attached and one.rank is not None else one for one in found]
        return tuple(sorted(found, key=lambda one: one.t_ns))

    def problems(self) -> tuple[str, ...]:
        unseen = () if self._tracers else super().problems()
        return (*self._watch.problems, *unseen, *self._unmet)

    def _attach(self, seen: Seen) -> None:
        """A rank that strace is not in front of: it was to come later, or its program is no Python."""
        lift_s = self.fault.target.for_s
        if lift_s is not None:
            self._watch.later(lift_s, lambda: self._detach(seen.who.pid))
        if {None, seen.rank} & self._front or (self.in_ranks() and (seen.folder / "process.json").exists()):
            return
        seen.folder.mkdir(parents=True, exist_ok=True)
        words = [word.replace("{folder}", str(seen.folder)) for word in self._words]
        with (seen.folder / "strace.log").open("wb") as log:
            tracer = subprocess.Popen(
                ["strace", *words, "-p", str(seen.who.pid)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.site.box.environ, **self.site.box.marker},
                start_new_session=True,
            )
        self._tracers[seen.who.pid] = (tracer, seen.who)
        give_up = self.site.clock.monotonic() + ATTACHED_WITHIN_S
        while _tracer(seen.who.pid) == 0 and seen.who.alive():
            if tracer.poll() is not None or self.site.clock.monotonic() > give_up:
                said = (seen.folder / "strace.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
                self._watch.problems[f"strace is not attached to pid {seen.who.pid}: {said[-1] if said else 'no answer'}"] = (
                    None
                )
                return
            self.site.clock.sleep(0.01)

    def _detach(self, pid: int) -> None:
        """SIGINT: strace lets go of whom it traces, and ends."""
        who = processes.identity(_tracer(pid))
        if who is None:
            return
        processes.send(who, signals.SIGINT)
        give_up = self.site.clock.monotonic() + DETACHED_WITHIN_S
        while who.alive() and self.site.clock.monotonic() < give_up:
            self.site.clock.sleep(0.01)


def _tracer(pid: int) -> int:
    """Who traces the process; 0 for nobody, and for a process that is gone."""
    try:
        text = (processes.PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    found = re.search(r"^TracerPid:\s+(\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _ended(tracer: subprocess.Popen[bytes]) -> None:
    tracer.send_signal(signals.SIGINT)
    try:
        tracer.wait(DETACHED_WITHIN_S)
    except subprocess.TimeoutExpired:
        tracer.kill()
        tracer.wait()


class FilteredInjection(EnteredInjection):
    """A seccomp filter that a small program sets before it becomes the rank's."""

    def __init__(self, fault: Fault, site: Site) -> None:
        super().__init__(fault, site)
        config = fault.config
        assert isinstance(config, Errno)
        self._config = config
        plan = json.dumps({"errno": getattr(errnos, config.error), "calls": list(config.call)})
        self.entry = Entry(
            front=(sys.executable, "-I", "-S", str(HERE / "filtered.py"), plan),
            detail=f"seccomp filter: {'+'.join(config.call)} fail with {config.error}; which calls met it is not counted",
        )

    def check(self) -> Unavailable | None:
        for key in ("nth", "every", "times", "after_s", "for_s"):
            if getattr(self.fault.target, key) is not None:
                return Unavailable(f"a filter holds for every call from start to end, not by {key}", "use syscall:error")
        try:
            library = filtered.library()
        except OSError:
            return Missing.of(f"{filtered.LIBRARY} is not installed", apt=["libseccomp2"])
        for name in self._config.call:
            if filtered.number(library, name) < 0:
                return Unavailable(f"this machine has no system call {name}", "its names are in syscalls(2)")
        return None

    def took(self, pid: int, rank: int | None) -> bool:
        try:
            text = (processes.PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return re.search(r"^Seccomp:\s+2$", text, re.MULTILINE) is not None


def make(fault: Fault, site: Site) -> Injection:
    return (FilteredInjection if fault.action == "errno" else TracedInjection)(fault, site)


injector = Injector(
    name="syscall",
    layer="syscall",
    title="system calls of chosen ranks fail, return something else, come late or are hit by a signal",
    certifies_not="The kernel's own behaviour behind the call: a disk that fails also makes writes that succeeded before be lost."
    " io_uring and memory-mapped files make no system call for each access.",
    needs=("linux",),
    actions={"error": Error, "retval": Retval, "signal": Signal, "delay": Delay, "errno": Errno},
    targets=("rank", "nth", "every", "times", "after_s", "for_s"),
    make=make,
)
