"""Passes the output of a watched command on while it runs: it goes to files first, which recorders and reports need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, ClassVar

from dtprobe.clock import Clock, SystemClock
from dtprobe.errors import Unavailable
from dtprobe.probes import RankProcess, Recorded, Recorder, Where
from dtprobe.probes.pacing import Sampler

SHARE = 0.01
PART = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Echo:
    """Copies `launcher/stdout.log` to `out` and `launcher/stderr.log` to `err` as they grow."""

    name: ClassVar[str] = "echo"
    heavy: ClassVar[bool] = False

    out: BinaryIO = field(repr=False)
    err: BinaryIO = field(repr=False)
    interval_s: float = 0.2

    def probe(self) -> Unavailable | None:
        return None

    def recorder(self, where: Where) -> EchoRecorder:
        return EchoRecorder(self, where)


class EchoRecorder(Recorder):
    def __init__(self, config: Echo, where: Where, clock: Clock | None = None) -> None:
        folder = where.folder / "launcher"
        self._streams: dict[Path, BinaryIO] = {folder / "stdout.log": config.out, folder / "stderr.log": config.err}
        self._passed = dict.fromkeys(self._streams, 0)
        clock = clock or SystemClock()
        self._sampler = Sampler("echo", self._look, interval_s=config.interval_s, share=SHARE, clock=clock)

    def start(self, processes: Sequence[RankProcess]) -> None:
        self._sampler.start()

    def stop(self) -> Recorded:
        if self._sampler.stop():
            self._look()
        return Recorded(cpu_s=self._sampler.cpu_s, problems=tuple(self._sampler.problems))

    def _look(self) -> float:
        for path, stream in list(self._streams.items()):
            try:
                with path.open("rb") as file:
                    file.seek(self._passed[path])
                    while part := file.read(PART):
                        stream.write(part)
                        self._passed[path] += len(part)
                stream.flush()
            except FileNotFoundError:
                continue
            except BrokenPipeError:  # the reader left: the rest is in the file
                del self._streams[path]
        return 0.0
