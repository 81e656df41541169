"""A rank's wall clock is wrong from the start, or jumps while it runs."""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dtprobe import processes
from dtprobe.catalog import load_module
from dtprobe.errors import Unavailable, UsageError
from dtprobe.inject import Firing, Injector, Site
from dtprobe.inject.entered import EnteredInjection, Entry
from dtprobe.inject.inrank import refusals
from dtprobe.inject.ranks import Seen, Watch
from dtprobe.inject.spec import Fault
from dtprobe.probes import RankProcess

HERE = Path(__file__).resolve().parent
build = load_module(HERE.parent / "nccl" / "build.py", "_dtprobe_injector_clock_build")

RANKS, SLOTS = 1024, 8
"""The table's shape in shift.c: a slot for each fault; the column after the last rank is for processes that are no rank."""
ROW = 8 * (RANKS + 1)
LOADED_WITHIN_S = 10.0
RETRY_S = 0.01
NANO = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Skew:
    """The wall clock is wrong by `seconds` from the start of the program (negative: it is slow)."""

    seconds: float

    def __post_init__(self) -> None:
        _check(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Jump:
    """The wall clock is right until `after_s`, then jumps by `seconds` (negative: back)."""

    seconds: float

    def __post_init__(self) -> None:
        _check(self.seconds)


def _check(seconds: float) -> None:
    if seconds == 0 or abs(seconds) > 1e9:
        raise ValueError(f"seconds={seconds:g} is 0 or more than 1e9")


class ClockInjection(EnteredInjection):
    """A library in front of libc's clocks that adds what a shared table says; the harness writes the table."""

    def __init__(self, fault: Fault, site: Site) -> None:
        super().__init__(fault, site)
        config = fault.config
        assert isinstance(config, Skew | Jump)
        self._offset_ns = round(config.seconds * NANO)
        self._folder = self._plan.folder.with_name(f"clock-{self._plan.folder.name}")
        self._table = self._folder / "table"
        self._slot = 0
        self._watch = Watch(site, fault.target, self._try)
        self._detail = f"wall clock {config.seconds:+g} s, monotonic clock untouched"
        self._hits: list[Firing] = []
        self._library: Path | None = None

    def check(self) -> Unavailable | None:
        if isinstance(self.fault.config, Skew) and self.fault.target.after_s is not None:
            return Unavailable("a skew is there from the start, so after_s contradicts it", "clock:jump comes later")
        if self.fault.target.rank and max(self.fault.target.rank) >= RANKS:
            return Unavailable(f"clocks of ranks from {RANKS} on are not in the table", f"aim below rank {RANKS}")
        made = build.library("libdtprobe-clock.so", (HERE / "shift.c",), environ=self.site.box.environ)
        if isinstance(made, Unavailable):
            return made
        self._library = made
        return None

    def prepare(self) -> None:
        assert self._library is not None, "check comes first"
        self._folder.mkdir(exist_ok=True)
        self._slot = len(list(self._folder.glob("fault-*")))
        if self._slot >= SLOTS:
            raise UsageError(f"{self._slot + 1} clock faults are more than the {SLOTS} that one run takes", "leave some out")
        (self._folder / f"fault-{self.site.index}").touch()
        if not self._table.exists():
            self._table.write_bytes(bytes(SLOTS * ROW))
        if isinstance(self.fault.config, Skew):
            self._set(None, self._offset_ns)
        self.entry = Entry(
            set={"DTPROBE_CLOCK_FILE": str(self._table)}, ahead={"LD_PRELOAD": str(self._library)}, detail=self._detail
        )
        super().prepare()

    def start(self, held: Sequence[RankProcess]) -> None:
        self._watch.start(held)

    def took(self, pid: int, rank: int | None) -> bool:
        try:
            maps = (processes.PROC / str(pid) / "maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return str(self._table) in maps

    def stop(self) -> tuple[Firing, ...]:
        self._watch.stop()
        self._plan.remove()
        if self._table.exists():
            self._set(None, 0)
        return tuple(sorted(self._hits, key=lambda one: one.t_ns))

    def problems(self) -> tuple[str, ...]:
        return (*self._watch.problems, *refusals(self.site))

    def _try(self, seen: Seen, waited_s: float = 0.0) -> None:
        """Once the library is there: the jump, or the skew that it brought."""
        if not self.took(seen.who.pid, seen.rank):
            if waited_s < LOADED_WITHIN_S and seen.who.alive():
                self._watch.later(RETRY_S, lambda: self._try(seen, waited_s + RETRY_S))
            else:
                self._watch.problems[f"pid {seen.who.pid} did not load the library that shifts its clock"] = None
            return
        self._set(seen.rank, self._offset_ns)
        self._hits.append(Firing(t_ns=self.site.clock.now_ns(), rank=seen.rank, detail=self._detail))
        if self.fault.target.for_s is not None:
            self._watch.later(self.fault.target.for_s, lambda: self._lift(seen.rank))

    def _lift(self, rank: int | None) -> None:
        self._set(rank, 0)
        now_ns = self.site.clock.now_ns()
        self._hits = [replace(one, ended_ns=now_ns) if one.rank == rank else one for one in self._hits]

    def _set(self, rank: int | None, offset_ns: int) -> None:
        """Of one rank, or of every process that is meant."""
        columns = [rank] if rank is not None else self.fault.target.rank or range(RANKS + 1)
        with self._table.open("r+b") as file, mmap.mmap(file.fileno(), 0) as table:
            for column in columns:
                struct.pack_into("=q", table, self._slot * ROW + 8 * column, offset_ns)


def probe() -> Unavailable | None:
    """Whether the library can be compiled here."""
    if not sys.platform.startswith("linux"):
        return Unavailable("LD_PRELOAD and /proc are Linux's", "")
    cc = build.compiler()
    return cc if isinstance(cc, Unavailable) else None


injector = Injector(
    name="clock",
    layer="libc",
    title="the wall clock of chosen ranks is wrong from the start, or jumps",
    certifies_not="Programs that ask the kernel past libc (Go, static binaries), file times, timers of the kernel (timerfd, timer_create),"
    " and what a wrong clock does outside the ranks: NTP, Kerberos, a shared file system's server.",
    needs=("linux", "cc"),
    actions={"skew": Skew, "jump": Jump},
    targets=("rank", "node", "after_s", "for_s"),
    make=ClockInjection,
    probe=probe,
)
