"""bpftrace on every rank, for calls that are too frequent for strace: tracepoints, and functions of libraries (uprobes).

`rank<k>/bpf.txt` has a line `<seconds since the epoch> <pid> <tid> <probe> <thread name>` for each event in the rank's
process (not in its children), then `@calls[<probe>]: <count>`, which is exact where bpftrace had to drop lines. Heavy: an
event costs a microsecond or two, a start about a second of processor time. The probes vanish with bpftrace.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dtprobe import doctor
from dtprobe.errors import Unavailable, UsageError
from dtprobe.probes import RankProcess, Recorded, Where
from dtprobe.probes.attached import READY_S, AttachedRecorder, Program

STOP_S = 5.0
_PROBE = re.compile(r"(?:tracepoint|uprobe|uretprobe|usdt):[\w:./+*@-]+")
# Attached first and last: when both have spoken, what lies between is attached too, in whatever order bpftrace did it.
_READY = 'interval:ms:20 /!@ready{0}/ {{ @ready{0} = 1; printf("ready{0}\\n"); }}'


@dataclass(frozen=True, kw_only=True)
class Bpf:
    """Records the named `probes` of bpftrace: `tracepoint:group:name`, `uprobe:/path/lib.so:function`, `usdt:...`.

    Raises UsageError for other kinds.
    """

    name: ClassVar[str] = "bpf"
    heavy: ClassVar[bool] = True

    probes: tuple[str, ...] = ("tracepoint:syscalls:sys_enter_clone", "tracepoint:syscalls:sys_enter_clone3")

    def __post_init__(self) -> None:
        odd = [probe for probe in self.probes if not _PROBE.fullmatch(probe)]
        if odd or not self.probes:
            raise UsageError(f"bpf: {odd or 'nothing'} to record", "name probes as `bpftrace -l` shows them")

    def probe(self) -> Unavailable | None:
        return doctor.capability("bpftrace")

    def recorder(self, where: Where) -> BpfRecorder:
        return BpfRecorder(self, where)


def script(probes: Sequence[str], pid: int) -> str:
    """The bpftrace program for one process."""
    stamp = 'printf("%s.%s %d %d %s %s\\n", strftime("%s", nsecs), strftime("%f", nsecs), pid, tid, probe, comm);'
    middle = [f"{probe} /pid == {pid}/ {{ @calls[probe] = count(); {stamp} }}" for probe in probes]
    forget = "END { clear(@ready1); clear(@ready2); }"
    return "\n".join((_READY.format(1), *middle, _READY.format(2), forget))


class BpfRecorder(AttachedRecorder):
    def __init__(self, config: Bpf, where: Where) -> None:
        super().__init__(where)
        self._config = config
        self._program = str(doctor.here().machine.which("bpftrace"))
        self._begun: list[tuple[RankProcess, Program]] = []

    def attach(self, process: RankProcess) -> None:
        out = process.folder / "bpf.txt"
        argv = (self._program, "-q", "-B", "line", "-e", script(self._config.probes, process.pid))
        program = Program(argv, process.folder / "bpf.log", self.where.environ, stdout=out)
        self._begun.append((process, program))
        give_up = self.clock.monotonic() + READY_S
        while program.running and self.clock.monotonic() < give_up:
            said = out.read_bytes()
            if b"ready1" in said and b"ready2" in said:
                return
            self.clock.sleep(0.02)
        self.problems.append(f"rank {process.rank}: bpftrace did not attach: {program.complaint()}")

    def stop(self) -> Recorded:
        self.end_attaching()
        deadline = self.clock.monotonic() + STOP_S
        for _, program in self._begun:
            program.end()
        files = []
        for process, program in self._begun:
            if not program.finished(deadline - self.clock.monotonic()):
                self.problems.append(f"rank {process.rank}: bpftrace did not end in time, its counts are missing")
            file = process.folder / "bpf.txt"
            _without_ready(file)
            files.append(file)
            lost = re.findall(r"Lost (\d+) events", program.complaints.read_text(encoding="utf-8", errors="replace"))
            if lost:
                self.problems.append(f"rank {process.rank}: {sum(map(int, lost))} lines were lost, the counts are exact")
            program.tidy()
        return Recorded(
            files=tuple(file for file in files if file.stat().st_size),
            cpu_s=sum(program.cpu_s for _, program in self._begun),
            problems=tuple(self.problems),
        )


def _without_ready(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(line for line in lines if line.strip() and not line.startswith(b"ready")))
