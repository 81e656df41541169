"""`/proc` of every rank, sampled: threads by name, descriptors by kind, mappings, memory, state, processor time.

One JSON line a sample in `rank<k>/proc.jsonl`, in the columns of the `proc` reader; `maps` is missing where it was not
counted in that sample (the kernel writes out every mapping to be counted). Nothing stops or slows the rank but the time
that the kernel takes to answer.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dtprobe import doctor
from dtprobe.clock import Clock, SystemClock
from dtprobe.errors import Unavailable
from dtprobe.probes import RankProcess, Recorded, Recorder, Where
from dtprobe.probes.pacing import Sampler
from dtprobe.probes.procfs import read_small

SHARE = 0.01
"""At most this much of one core, over all ranks; of which mappings and renamed threads get half."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_KEPT = ("stat", "status", "wchan")
"""Files that are read in every sample: kept open, which halves their cost."""
_KINDS = (("socket:", "sockets"), ("pipe:", "pipes"), ("/", "files"))


@dataclass(frozen=True, kw_only=True)
class Proc:
    """Samples `hz` times a second, less often where that would cost more than one percent of a core."""

    name: ClassVar[str] = "proc"
    heavy: ClassVar[bool] = False

    hz: float = 20.0

    def probe(self) -> Unavailable | None:
        return doctor.capability("linux")

    def recorder(self, where: Where) -> ProcRecorder:
        return ProcRecorder(self, where)


class ProcRecorder(Recorder):
    def __init__(self, config: Proc, where: Where, clock: Clock | None = None) -> None:
        self._where = where
        self._clock = clock or SystemClock()
        self._watched: dict[int, _Watched] = {}
        self._sampler = Sampler("proc", self._look, interval_s=1 / config.hz, share=SHARE, clock=self._clock)

    def start(self, processes: Sequence[RankProcess]) -> None:
        self._sampler.start()

    def suspected(self, reason: str) -> None:
        self._sampler.wake()

    def stop(self) -> Recorded:
        problems = []
        if self._sampler.stop():
            for watched in self._watched.values():
                watched.sample(self._clock, whole=True)
                watched.close()
        else:
            problems.append("a read of /proc did not return: the last sample is missing")
        return Recorded(
            files=tuple(watched.path for watched in self._watched.values() if watched.samples),
            cpu_s=self._sampler.cpu_s,
            problems=(*problems, *self._sampler.problems),
            facts={"rate": f"{self._sampler.rate_hz:.1f} samples a second reached"},
        )

    def _look(self) -> float:
        for process in self._where.processes():
            if process.rank is not None and process.pid not in self._watched:
                self._watched[process.pid] = _Watched(process)
        for watched in self._watched.values():
            watched.sample(self._clock)
        return 0.0


class _Watched:
    """One rank's process under watch."""

    def __init__(self, process: RankProcess) -> None:
        self.path: Path = process.folder / "proc.jsonl"
        self.samples = 0
        self._process = process
        self._proc = f"/proc/{process.pid}"
        self._gone = False
        self._handles: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._dear_at = 0.0
        process.folder.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a harness that is killed has written all that it saw.
        self._file = self.path.open("ab", buffering=0)
        try:
            for name in _KEPT:
                self._handles[name] = os.open(f"{self._proc}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._gone = True

    def sample(self, clock: Clock, whole: bool = False) -> None:
        """Write one line. A process that has ended is not looked at again."""
        if self._gone:
            return
        began = clock.monotonic()
        dear = whole or began >= self._dear_at
        try:
            row = self._row(dear)
        except (ProcessLookupError, FileNotFoundError):
            self._gone = True
            return
        line = {"t_ns": clock.now_ns(), "pid": self._process.pid, "rank": self._process.rank, **row}
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self.samples += 1
        if dear:
            self._dear_at = began + max(0.5, (clock.monotonic() - began) / (SHARE / 2))

    def close(self) -> None:
        self._file.close()
        for handle in self._handles.values():
            os.close(handle)
        if not self.samples:
            self.path.unlink(missing_ok=True)

    def _row(self, dear: bool) -> dict[str, object]:
        # The name may hold spaces and parentheses: fields are counted from the last parenthesis, state (3) first.
        stat = self._read("stat").rpartition(b")")[2].split()
        if stat[0] in (b"Z", b"X"):
            raise ProcessLookupError
        row: dict[str, object] = {
            "threads": int(stat[17]),
            "rss_bytes": int(stat[21]) * _PAGE,
            "state": stat[0].decode("ascii"),
            "wchan": self._wchan(),
            "cpu_user_s": int(stat[11]) / _TICKS,
            "cpu_system_s": int(stat[12]) / _TICKS,
        }
        row |= self._descriptors()
        row |= self._switches()
        if dear:
            row["maps"] = self._mappings()
        row["thread_names"] = self._threads(anew=dear)
        return row

    def _read(self, name: str) -> bytes:
        """The file as it is now. The handle means this process for good, also when its pid is used again."""
        return os.pread(self._handles[name], 1 << 16, 0)

    def _wchan(self) -> str | None:
        try:
            text = self._read("wchan").decode("ascii", "replace")
        except PermissionError:  # not our process
            return None
        return text if text not in ("", "0") else None

    def _descriptors(self) -> dict[str, object]:
        kinds = Counter[str]()
        try:
            numbers = os.listdir(f"{self._proc}/fd")  # noqa: PTH208  a path object costs more than the call
        except PermissionError:  # not our process, or it changed its user
            return {}
        for number in numbers:
            try:
                target = os.readlink(f"{self._proc}/fd/{number}")  # noqa: PTH115
            except OSError:  # closed since it was listed
                continue
            kinds.update(name for prefix, name in _KINDS if target.startswith(prefix))
        return {"fds": len(numbers), **{name: kinds[name] for _, name in _KINDS}}

    def _switches(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for line in self._read("status").splitlines():
            if b"voluntary_ctxt" in line:
                found["involuntary" if line.startswith(b"non") else "voluntary"] = int(line.split()[1])
        return found

    def _mappings(self) -> int | None:
        try:
            handle = os.open(f"{self._proc}/maps", os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            return None
        try:
            count = 0
            while part := os.read(handle, 1 << 18):
                count += part.count(b"\n")
            return count
        finally:
            os.close(handle)

    def _threads(self, anew: bool) -> dict[str, int]:
        """Threads by name. Names are read when a thread is first seen, and `anew` since a thread names itself later."""
        known = {} if anew else self._names
        self._names = {}
        for tid in os.listdir(f"{self._proc}/task"):  # noqa: PTH208
            name = known.get(tid)
            if name is None:
                try:
                    name = read_small(f"{self._proc}/task/{tid}/comm").decode("utf-8", "replace").rstrip("\n")
                except OSError:  # ended since it was listed
                    continue
            self._names[tid] = name
        return dict(Counter(self._names.values()))
