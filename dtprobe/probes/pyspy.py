"""Python stacks of the ranks from outside (py-spy): on a suspected hang, and on a schedule where one is given.

`rank<k>/pyspy-<n>.json` is py-spy's own JSON; when it was taken is the file's time. One rank at a time, since py-spy stops a
process while it reads it; how long is in `Recorded.stopped_s`, an upper bound since py-spy's own start is in it (as in
`cpu_s`). It does not stop a rank that another tracer holds, or that is in an uninterruptible call; a rank stopped by a signal cannot be
read at all (its memory map is never consistent for py-spy), which is said with what /proc shows of it.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dtprobe import doctor, processes
from dtprobe.clock import Clock, SystemClock
from dtprobe.errors import Unavailable
from dtprobe.probes import RankProcess, Recorded, Recorder, Where
from dtprobe.probes.pacing import Sampler
from dtprobe.probes.procfs import condition, read_small

SHARE = 0.005
DUMP_TIMEOUT_S = 4.0


@dataclass(frozen=True, kw_only=True)
class PySpy:
    """Takes stacks of every rank at the first `on_suspicion` suspicions, and every `every_s` seconds (None: not)."""

    name: ClassVar[str] = "pyspy"
    heavy: ClassVar[bool] = False

    on_suspicion: int = 3
    every_s: float | None = None
    native: bool = False
    """C frames too: needs debug symbols to say much, and ten times the time."""
    children: int = 2
    """So many of a rank's children that run the same program (a loader's forked workers) are read after it, the youngest first."""

    def probe(self) -> Unavailable | None:
        return doctor.capability("pyspy")

    def recorder(self, where: Where) -> PySpyRecorder:
        return PySpyRecorder(self, where)


class PySpyRecorder(Recorder):
    def __init__(self, config: PySpy, where: Where, clock: Clock | None = None) -> None:
        self._config = config
        self._where = where
        self._clock = clock or SystemClock()
        self._suspicions = 0
        self._lock = threading.Lock()
        self._over = False
        self._running: subprocess.Popen[bytes] | None = None
        self._files: list[Path] = []
        self._problems: dict[str, None] = {}
        self._stopped_s = 0.0
        self._cpu_s = 0.0
        self._schedule: Sampler | None = None
        if config.every_s is not None:
            self._schedule = Sampler("pyspy", self._round, interval_s=config.every_s, share=SHARE, clock=self._clock)

    def start(self, processes: Sequence[RankProcess]) -> None:
        if self._schedule is not None:
            self._schedule.start()

    def suspected(self, reason: str) -> None:
        with self._lock:
            self._suspicions += 1
            if self._suspicions > self._config.on_suspicion:
                return
        self._round()

    def stop(self) -> Recorded:
        self._over = True
        if (running := self._running) is not None:
            running.kill()
        if self._schedule is not None:
            self._schedule.stop()
            self._problems.update(dict.fromkeys(self._schedule.problems))
        return Recorded(
            files=tuple(self._files),
            cpu_s=self._cpu_s,
            stopped_s=self._stopped_s,
            problems=tuple(self._problems),
            facts={"suspicions": str(self._suspicions)} if self._suspicions else {},
        )

    def _round(self) -> float:
        """Every rank once, one after the other; answers the processor time of the dumps."""
        spent = 0.0
        for process in self._where.processes():
            if process.rank is None:
                continue
            with self._lock:
                if self._over:
                    break
                spent += self._dump(process)
                for pid in _forked(process.pid)[: self._config.children]:
                    if not self._over:
                        spent += self._dump(process, pid)
        return spent

    def _dump(self, process: RankProcess, child: int | None = None) -> float:
        """The stacks of a rank, or of a child of it: a file of its own each."""
        pid = process.pid if child is None else child
        found = condition(pid)
        if child is not None and (found is None or found.ended or found.stopped):
            return 0.0
        if found is None or found.ended:
            self._problems[f"rank {process.rank} has ended: no stacks"] = None
            return 0.0
        if found.stopped:
            self._problems[f"rank {process.rank} is stopped ({found}): py-spy cannot read it"] = None
            return 0.0
        pause = found.state != "D" and not _traced(pid)
        program = doctor.here().machine.which("py-spy")
        if program is None:
            self._problems["py-spy is gone"] = None
            return 0.0
        argv = [str(program), "dump", "--json", "--pid", str(pid)]
        argv += ["--native"] if self._config.native else []
        argv += [] if pause else ["--nonblocking"]
        began = self._clock.monotonic()
        self._running = subprocess.Popen(
            argv,
            env=self._where.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, complaint = self._running.communicate(timeout=DUMP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._running.kill()
            out, complaint = self._running.communicate()
            complaint = complaint or f"no answer in {DUMP_TIMEOUT_S:g} s".encode()
            _resume(pid)
        code, self._running = self._running.returncode, None
        took_s = self._clock.monotonic() - began
        if pause:
            self._stopped_s += took_s
        self._cpu_s += took_s
        if code != 0 or not out:
            if child is not None:
                return took_s  # it ended meanwhile, or is no Python program after all
            last = complaint.decode("utf-8", "replace").strip().splitlines() or [f"py-spy ended with {code}"]
            self._problems[f"rank {process.rank} ({found}): {' '.join(last)[:300]}"] = None
            return took_s
        self._files.append(_write(process.folder, out))
        return took_s


def _forked(pid: int) -> list[int]:
    """The children of a process that run its program still, the youngest first: forked, without a program of their own."""
    own = _program(pid)
    found = [one for one in processes.descendants(pid) if not one.ended and own and _program(one.pid) == own]
    return [one.pid for one in sorted(found, key=lambda one: -one.start)]


def _program(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return ""


def _resume(pid: int) -> None:
    """A tracer that is killed at the wrong moment leaves the process stopped, which it was not before."""
    found, known = condition(pid), processes.identity(pid)
    if found is not None and found.stopped and known is not None:
        processes.send(known, signal.SIGCONT)


def _write(folder: Path, text: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    taken = sum(1 for _ in folder.glob("pyspy-*.json"))
    path = folder / f"pyspy-{taken}.json"
    temporary = folder / f".{path.name}"
    temporary.write_bytes(text)
    temporary.replace(path)
    return path


def _traced(pid: int) -> bool:
    """Whether a tracer holds it already (strace, gdb): a second one cannot attach."""
    try:
        status = read_small(f"/proc/{pid}/status")
    except OSError:
        return False
    return next((line.split()[1] != b"0" for line in status.splitlines() if line.startswith(b"TracerPid:")), False)
