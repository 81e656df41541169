"""System calls of every rank and its children, in strace's own text: `rank<k>/strace.txt`.

Heavy: without seccomp-bpf every call of the rank stops it twice (33 to 63 us a call), with it only the chosen ones do (the
others cost 0.6 us). So that this holds for new threads too, `set_robust_list` is traced with the chosen calls (see `THREADS_FIRST`).
strace is put in front of the rank's command and steps aside (`-D`), so the rank keeps its pid.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dtprobe import doctor
from dtprobe.errors import Unavailable, UsageError
from dtprobe.probes import Recorded, Recorder, Where

THREADS_FIRST = "set_robust_list"
"""The C library's first call in a thread. strace 6.1 stops a new thread at every call until it makes a traced one: seen in a
turn of two threads over a socket pair, 12.4 us of processor time with clone and clone3 traced, 5.0 with this one besides, as without."""

_CALLS = re.compile(r"!?[\w%/?]+(,[\w%/?]+)*")


@dataclass(frozen=True, kw_only=True)
class Strace:
    """Traces `calls`: names of system calls or strace's classes (`%network`), separated by commas.

    A name that this machine's architecture does not know is left out. Raises UsageError for what strace would not take.
    """

    name: ClassVar[str] = "strace"
    heavy: ClassVar[bool] = True

    calls: str = "clone,clone3,execve,exit_group,kill,tgkill"

    def __post_init__(self) -> None:
        if not _CALLS.fullmatch(self.calls):
            raise UsageError(f"strace: calls={self.calls!r} is no list of system calls", "write names separated by commas")

    def probe(self) -> Unavailable | None:
        return doctor.capability("strace")

    def recorder(self, where: Where) -> StraceRecorder:
        return StraceRecorder(self, where)


class StraceRecorder(Recorder):
    def __init__(self, config: Strace, where: Where) -> None:
        self._where = where
        self._slow = doctor.capability("strace-seccomp")
        first, *others = config.calls.split(",")
        negated, first = first.startswith("!"), first.removeprefix("!")
        if not self._slow and not negated:
            others.append(THREADS_FIRST)
        names = ",".join(name if name.startswith(("?", "%", "/")) else f"?{name}" for name in (first, *others))
        self._trace = ("!" if negated else "") + names
        self._files: list[Path] = []
        self._aside: list[str] = []

    def wrap(self, rank: int | None, argv: tuple[str, ...]) -> tuple[str, ...]:
        if "strace" in argv:  # a fault at system calls; what it traces is in the same file
            self._aside.append("the command" if rank is None else f"rank {rank}")
            return argv
        folder = self._where.folder / "launcher" if rank is None else self._where.rank_folder(rank)
        folder.mkdir(parents=True, exist_ok=True)
        self._files.append(folder / "strace.txt")
        cheap = () if self._slow else ("--seccomp-bpf",)
        return (
            *("strace", "-q", "-D", "-f", "-ttt", "-T", "-y", *cheap),
            *("-e", f"trace={self._trace}", "-o", str(self._files[-1]), "--", *argv),
        )

    def stop(self) -> Recorded:
        problems = [f"every call stops the rank: {self._slow}"] if self._slow else []
        problems += [f"{who} is traced by a fault at its system calls: a process has one tracer" for who in self._aside]
        written = [file for file in self._files if file.exists()]
        problems += [
            f"{file.parent.name}: strace wrote nothing; its complaint is in stderr.log there"
            for file in self._files
            if file not in written
        ]
        return Recorded(files=tuple(written), problems=tuple(problems))
