"""Recorders that are programs attached to a rank by its pid: one for each rank, begun before the rank runs where it can be."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from dtprobe.clock import Clock, SystemClock
from dtprobe.probes import RankProcess, Recorder, Where
from dtprobe.probes.pacing import Sampler

READY_S = 5.0
"""A program that is not attached by then is given up."""


class Program:
    """A recorder's program under way."""

    def __init__(
        self,
        argv: Sequence[str],
        complaints: Path,
        environ: Mapping[str, str],
        *,
        pass_fds: Sequence[int] = (),
        stdout: Path | None = None,
    ) -> None:
        self.complaints = complaints
        self.cpu_s = 0.0
        self.held_fds: tuple[int, ...] = ()
        """Descriptors that it needs open on this side, closed when it has finished."""
        with complaints.open("wb") as err, (stdout or Path("/dev/null")).open("wb") as out:
            self._child = subprocess.Popen(
                list(argv),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._child.poll() is None

    def end(self, signum: int = signal.SIGINT) -> None:
        """Ask it to finish; it may take its time."""
        if not self.running:
            return
        try:
            times = psutil.Process(self._child.pid).cpu_times()
            self.cpu_s = times.user + times.system
        except psutil.NoSuchProcess:
            return
        self._child.send_signal(signum)

    def finished(self, timeout_s: float) -> bool:
        """Wait so long; kill it where it has not ended. Whether it ended by itself."""
        try:
            self._child.wait(max(0.0, timeout_s))
            ended = True
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            ended = False
        for handle in self.held_fds:
            os.close(handle)
        self.held_fds = ()
        return ended

    def complaint(self) -> str:
        """The last thing that it said on standard error."""
        lines = self.complaints.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"ended with {self._child.returncode}"

    def tidy(self) -> None:
        self.complaints.unlink(missing_ok=True)


class AttachedRecorder(Recorder):
    """Attaches to the ranks there are at the start, and to those that a launcher brings later, as soon as they are seen."""

    def __init__(self, where: Where, clock: Clock | None = None) -> None:
        self.where = where
        self.clock = clock or SystemClock()
        self.problems: list[str] = []
        self._known: set[int] = set()
        self._later = Sampler(type(self).__name__, self._look, interval_s=0.1, share=0.005, clock=self.clock)

    def attach(self, process: RankProcess) -> None:
        """Attach to a rank and wait until that is done; what goes wrong is added to `problems`."""
        raise NotImplementedError

    def start(self, processes: Sequence[RankProcess]) -> None:
        self._attach_new(processes)
        if self.where.world_size is None or len(self._known) < self.where.world_size:
            self._later.start()

    def end_attaching(self) -> None:
        self._later.stop()
        self.problems += self._later.problems

    def _look(self) -> float:
        self._attach_new(self.where.processes())
        return 0.0

    def _attach_new(self, processes: Sequence[RankProcess]) -> None:
        for process in processes:
            if process.rank is not None and process.pid not in self._known:
                self._known.add(process.pid)
                process.folder.mkdir(parents=True, exist_ok=True)
                self.attach(process)
