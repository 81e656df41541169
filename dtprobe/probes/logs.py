"""When the ranks' logs grew: standard output and error are files already, but their lines bear no time.

`rank<k>/log-times.jsonl` has a line `{"t_ns", "stream": "stdout"|"stderr", "size": bytes}` for each growth that was seen: what
of that stream lies before byte `size` and was not there at the previous growth was written at `t_ns` or up to the interval
earlier.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dtprobe.clock import Clock, SystemClock
from dtprobe.errors import Unavailable
from dtprobe.probes import RankProcess, Recorded, Recorder, Where
from dtprobe.probes.pacing import Sampler

STREAMS = ("stdout", "stderr")
SHARE = 0.002


@dataclass(frozen=True, kw_only=True)
class Logs:
    """Looks every `interval_s` at the sizes of the ranks' logs; that is the error of a line's time."""

    name: ClassVar[str] = "logs"
    heavy: ClassVar[bool] = False

    interval_s: float = 0.1

    def probe(self) -> Unavailable | None:
        return None

    def recorder(self, where: Where) -> LogsRecorder:
        return LogsRecorder(self, where)


class LogsRecorder(Recorder):
    def __init__(self, config: Logs, where: Where, clock: Clock | None = None) -> None:
        self._where = where
        self._clock = clock or SystemClock()
        self._sizes: dict[Path, int] = {}
        self._files: dict[Path, None] = {}
        self._sampler = Sampler("logs", self._look, interval_s=config.interval_s, share=SHARE, clock=self._clock)

    def start(self, processes: Sequence[RankProcess]) -> None:
        self._sampler.start()

    def stop(self) -> Recorded:
        if self._sampler.stop():
            self._look()
        return Recorded(files=tuple(self._files), cpu_s=self._sampler.cpu_s, problems=tuple(self._sampler.problems))

    def _look(self) -> float:
        for process in self._where.processes():
            if process.rank is None:
                continue
            grown = []
            for stream in STREAMS:
                log = process.folder / f"{stream}.log"
                try:
                    size = log.stat().st_size
                except FileNotFoundError:
                    continue
                if size != self._sizes.get(log, 0):
                    self._sizes[log] = size
                    grown.append(json.dumps({"t_ns": self._clock.now_ns(), "stream": stream, "size": size}) + "\n")
            if grown:
                times = process.folder / "log-times.jsonl"
                self._files[times] = None
                with times.open("a", encoding="ascii") as file:
                    file.writelines(grown)
        return 0.0
