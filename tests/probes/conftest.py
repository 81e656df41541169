"""Ranks for the recorders' tests: real processes, started the way a launcher does, without one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dtprobe.probes import RankProcess, Recorded, Recorder, Where

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Ranks:
    """Ranks of one arm run under recorders: `hold` starts them before their program, `go` lets them run."""

    folder: Path
    scratch: Path
    world_size: int
    suspected: list[str] = field(default_factory=list)
    recorders: list[Recorder] = field(default_factory=list)
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def where(self) -> Where:
        return Where(
            folder=self.folder,
            scratch=self.scratch,
            world_size=self.world_size,
            processes=self.processes,
            suspect=self._suspect,
            environ=os.environ,
        )

    def processes(self) -> list[RankProcess]:
        return [RankProcess(rank, child.pid, self.rank(rank)) for rank, child in enumerate(self.children)]

    def rank(self, rank: int) -> Path:
        return self.folder / f"rank{rank}"

    def under(self, probe: object) -> Recorder:
        """Add a recorder of this configuration."""
        recorder = probe.recorder(self.where)
        self.recorders.append(recorder)
        return recorder

    def hold(self, program: str, environ: Mapping[str, str] | None = None) -> None:
        script = self.folder / "worker.py"
        script.write_text(program, encoding="utf-8")
        for rank in range(self.world_size):
            self.rank(rank).mkdir(exist_ok=True)
            argv: tuple[str, ...] = (sys.executable, str(script))
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "STORE": str(self.folder / "store"),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "DTPROBE_RANK_FOLDER": str(self.rank(rank)),
                **(environ or {}),
            }
            paths = [str(ROOT)]
            for recorder in self.recorders:
                argv = recorder.wrap(rank, argv)
                added = dict(recorder.environ(rank))
                paths.insert(0, added.pop("PYTHONPATH", paths[0]))
                environment |= added
            environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
            with (self.rank(rank) / "stdout.log").open("wb") as out, (self.rank(rank) / "stderr.log").open("wb") as err:
                self.children.append(
                    subprocess.Popen(
                        ("/bin/sh", "-c", 'read _ && exec "$@" </dev/null', "held", *argv),
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                )
        for recorder in self.recorders:
            recorder.start(self.processes())

    def go(self) -> None:
        for child in self.children:
            assert child.stdin is not None
            child.stdin.write(b"\n")
            child.stdin.close()

    def run(self, program: str, environ: Mapping[str, str] | None = None) -> None:
        self.hold(program, environ)
        self.go()

    def wait(self, timeout_s: float = 60) -> list[int]:
        """Exit codes, once all have ended by themselves."""
        return [child.wait(timeout_s) for child in self.children]

    def until(self, happened: Callable[[], object], what: str, timeout_s: float = 45) -> None:
        give_up = time.monotonic() + timeout_s
        while not happened():
            said = [(self.rank(rank) / "stderr.log").read_text(errors="replace")[-2000:] for rank in range(self.world_size)]
            assert time.monotonic() < give_up, (
                f"not within {timeout_s:g} s: {what}; ranks said {said}, suspected {self.suspected}"
            )
            time.sleep(0.02)

    def says(self, rank: int, text: str) -> Callable[[], bool]:
        return lambda: text in (self.rank(rank) / "stdout.log").read_text(errors="replace")

    def stop(self) -> Recorded:
        """Stop the only recorder, which must not take longer than the protocol grants."""
        (recorder,) = self.recorders
        began = time.monotonic()
        recorded = recorder.stop()
        assert time.monotonic() - began < 10
        self.recorders.clear()
        return recorded

    def end(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait()
            assert child.stdin is not None
            child.stdin.close()
        for recorder in self.recorders:
            recorder.stop()

    def _suspect(self, reason: str) -> None:
        self.suspected.append(reason)
        for recorder in self.recorders:
            recorder.suspected(reason)


@pytest.fixture
def ranks(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """`ranks(2)`: two ranks to be run under recorders; ended after the test."""
    made: list[Ranks] = []

    def make(world_size: int) -> Ranks:
        folder = tmp_path / f"arm{len(made)}"
        folder.mkdir()
        made.append(Ranks(folder, tmp_path_factory.mktemp("s"), world_size))
        return made[-1]

    yield make
    for one in made:
        one.end()
