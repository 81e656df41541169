"""perf on every rank: tracepoints as samples (`perf.data`, `perf.script.txt`) and counts of events (`perf.stat.txt`).

Heavy where a tracepoint is frequent. Attached to the rank's pid while it is held before its program, and inherited by its
threads and children. The kernel takes no real-time clock for tracepoints (it may not be read in an NMI), so perf counts on the
monotonic one; in the text the times are in seconds since the epoch.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dtprobe import doctor
from dtprobe.errors import Unavailable, UsageError
from dtprobe.probes import RankProcess, Recorded, Where
from dtprobe.probes.attached import READY_S, AttachedRecorder, Program

STOP_S = 8.0
"""How long the end may take, all ranks together: perf script is slow."""

_EVENT = re.compile(r"[\w:*?/=.-]+")
_TIME = re.compile(r" (\d+)\.(\d{9}): ")
_TRACEFS = (Path("/sys/kernel/tracing/events"), Path("/sys/kernel/debug/tracing/events"))


@dataclass(frozen=True, kw_only=True)
class Perf:
    """Samples each `record` event (tracepoints, `group:name`), counts each `count` event; `stacks` with call stacks.

    Raises UsageError for what is no event's name.
    """

    name: ClassVar[str] = "perf"
    heavy: ClassVar[bool] = True

    record: tuple[str, ...] = ("syscalls:sys_enter_clone", "syscalls:sys_enter_clone3", "sched:sched_process_exit")
    count: tuple[str, ...] = ("task-clock", "context-switches", "cpu-migrations", "page-faults")
    stacks: bool = False

    def __post_init__(self) -> None:
        odd = [event for event in (*self.record, *self.count) if not _EVENT.fullmatch(event)]
        if odd or not (self.record or self.count):
            raise UsageError(f"perf: {odd or 'nothing'} to record", "name events as `perf list` shows them")

    def probe(self) -> Unavailable | None:
        if not self.record:
            return doctor.capability("perf")
        missing = doctor.capability("perf-tracepoints")
        if missing is None and not any(folder.is_dir() for folder in _TRACEFS):
            return Unavailable("tracefs is not mounted", "mount -t tracefs nodev /sys/kernel/tracing")
        return missing

    def recorder(self, where: Where) -> PerfRecorder:
        return PerfRecorder(self, where)


class PerfRecorder(AttachedRecorder):
    def __init__(self, config: Perf, where: Where) -> None:
        super().__init__(where)
        self._config = config
        self._program = str(doctor.here().machine.which("perf"))
        self._recording: list[tuple[RankProcess, Program]] = []
        self._counting: list[tuple[RankProcess, Program]] = []
        self._offset_ns = self.clock.now_ns() - int(self.clock.monotonic() * 1e9)

    def attach(self, process: RankProcess) -> None:
        config, folder = self._config, process.folder
        if config.record:
            argv = ("record", "-k", "CLOCK_MONOTONIC", "-o", str(folder / "perf.data"), *(("-g",) if config.stacks else ()))
            self._begin(self._recording, process, argv, config.record, "perf.record.log")
        if config.count:
            argv = ("stat", "-o", str(folder / "perf.stat.txt"))
            self._begin(self._counting, process, argv, config.count, "perf.stat.log")

    def stop(self) -> Recorded:
        self.end_attaching()
        deadline = self.clock.monotonic() + STOP_S
        begun = [*self._recording, *self._counting]
        for _, program in begun:
            program.end()
        files = []
        for process, program in begun:
            if not program.finished(deadline - STOP_S / 2 - self.clock.monotonic()):
                self.problems.append(f"rank {process.rank}: perf did not end in time")
        files += [process.folder / "perf.stat.txt" for process, _ in self._counting]
        scripts = [(process, self._script(process)) for process, _ in self._recording if _filled(process.folder / "perf.data")]
        for process, script in scripts:
            files += [process.folder / "perf.data", process.folder / "perf.script.txt"]
            if not script.finished(deadline - self.clock.monotonic()):
                self.problems.append(f"rank {process.rank}: perf.script.txt is cut, perf script was not done in time")
            _since_the_epoch(process.folder / "perf.script.txt", self._offset_ns)
        for _, program in [*begun, *scripts]:
            program.tidy()
        return Recorded(
            files=tuple(file for file in files if _filled(file)),
            cpu_s=sum(program.cpu_s for _, program in begun),
            problems=tuple(self.problems),
        )

    def _begin(
        self,
        begun: list[tuple[RankProcess, Program]],
        process: RankProcess,
        argv: Sequence[str],
        events: Sequence[str],
        complaints: str,
    ) -> None:
        """Start perf with its events off, turn them on by its control channel, and wait for its word that they are."""
        its_control, control = os.pipe()
        answer, its_answer = os.pipe()
        try:
            program = Program(
                (
                    *(self._program, *argv, "-D", "-1", "--control", f"fd:{its_control},{its_answer}"),
                    *(part for event in events for part in ("-e", event)),
                    *("-p", str(process.pid)),
                ),
                process.folder / complaints,
                self.where.environ,
                pass_fds=(its_control, its_answer),
            )
        finally:
            os.close(its_control)
            os.close(its_answer)
        begun.append((process, program))
        # Open until perf has ended: it fails over a control channel that closes under it.
        program.held_fds = (control, answer)
        try:
            os.write(control, b"enable\n")
        except BrokenPipeError:
            ready = False
        else:
            readable, _, _ = select.select([answer], [], [], READY_S)
            ready = bool(readable and os.read(answer, 16))
        if not ready:
            program.finished(0)
            self.problems.append(f"rank {process.rank}: perf {argv[0]} did not attach: {program.complaint()}")

    def _script(self, process: RankProcess) -> Program:
        fields = "comm,pid,tid,cpu,time,event,trace" + (",ip,sym,dso" if self._config.stacks else "")
        # Without --no-inline it asks addr2line for each frame: minutes instead of seconds.
        argv = (self._program, "script", "--no-inline", "--ns", "-F", fields, "-i", str(process.folder / "perf.data"))
        return Program(argv, process.folder / "perf.script.log", self.where.environ, stdout=process.folder / "perf.script.txt")


def _since_the_epoch(script: Path, offset_ns: int) -> None:
    """Add the offset to the times of a script's lines. Frames of stacks begin with a tab and bear none."""

    def shifted(found: re.Match[str]) -> str:
        time_ns = int(found[1]) * 10**9 + int(found[2]) + offset_ns
        return f" {time_ns // 10**9}.{time_ns % 10**9:09d}: "

    whole = script.with_name(f".{script.name}")
    with (
        script.open(encoding="utf-8", errors="surrogateescape") as old,
        whole.open("w", encoding="utf-8", errors="surrogateescape") as new,
    ):
        new.writelines(line if line.startswith("\t") else _TIME.sub(shifted, line, count=1) for line in old)
    whole.replace(script)


def _filled(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0
