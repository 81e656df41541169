"""NVIDIA's timeline profiler on every rank, where it is installed: `rank<k>/nsys.nsys-rep` and its tables, `nsys.sqlite`.

Without a GPU it records calls of the C library (osrt) only. Heavy. nsys is the parent of the rank's program: the pid that
the harness knows is nsys's own, which hands signals on; other recorders then see nsys and not the program.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dtprobe import doctor
from dtprobe.clock import Clock, SystemClock
from dtprobe.errors import Unavailable
from dtprobe.probes import Recorded, Recorder, Where

STOP_S = 8.0
REPORTS = (".nsys-rep", ".qdrep")
"""Suffixes: nsys called them qdrep until 2021.3."""


@dataclass(frozen=True, kw_only=True)
class Nsys:
    """Traces CUDA, NVTX and C library calls where a GPU is visible, C library calls alone elsewhere."""

    name: ClassVar[str] = "nsys"
    heavy: ClassVar[bool] = True

    def probe(self) -> Unavailable | None:
        return doctor.capability("nsys")

    def recorder(self, where: Where) -> NsysRecorder:
        return NsysRecorder(where, traces=("osrt",) if doctor.capability("cuda") else ("cuda", "nvtx", "osrt"))


class NsysRecorder(Recorder):
    def __init__(self, where: Where, traces: tuple[str, ...], program: Path | None = None, clock: Clock | None = None) -> None:
        self._where = where
        self._traces = traces
        self._program = str(program or doctor.here().machine.which("nsys") or "nsys")
        self._clock = clock or SystemClock()
        self._outputs: list[Path] = []

    def wrap(self, rank: int | None, argv: tuple[str, ...]) -> tuple[str, ...]:
        folder = self._where.folder / "launcher" if rank is None else self._where.rank_folder(rank)
        folder.mkdir(parents=True, exist_ok=True)
        self._outputs.append(folder / "nsys")
        return (
            *(self._program, "profile", "-t", ",".join(self._traces), "-s", "none", "--cpuctxsw=none"),
            *("--force-overwrite=true", "-o", str(self._outputs[-1]), *argv),
        )

    def stop(self) -> Recorded:
        deadline = self._clock.monotonic() + STOP_S
        files, problems = [], []
        for output in self._outputs:
            report = next((found for suffix in REPORTS if (found := output.with_suffix(suffix)).exists()), None)
            if report is None:
                problems.append(f"{output.parent.name}: nsys left no report; its complaint is in stderr.log there")
                continue
            files.append(report)
            tables = output.with_suffix(".sqlite")
            argv = (self._program, "export", "--type=sqlite", "--force-overwrite=true", f"--output={tables}", str(report))
            try:
                done = subprocess.run(
                    argv,
                    env=self._where.environ,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=max(0.1, deadline - self._clock.monotonic()),
                    check=False,
                )
            except subprocess.TimeoutExpired:
                tables.unlink(missing_ok=True)
                problems.append(f"{output.parent.name}: the export was not done in time; later: {' '.join(argv)}")
                continue
            if done.returncode == 0 and tables.exists():
                files.append(tables)
            else:
                said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
                problems.append(f"{output.parent.name}: nsys export: {said[-1] if said else done.returncode}")
        return Recorded(files=tuple(files), problems=tuple(problems))
