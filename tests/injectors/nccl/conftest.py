"""The shim and the test double of libnccl, compiled once with warnings as errors, and ranks that call them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from dtprobe import catalog
from dtprobe.errors import Unavailable
from dtprobe.inject.spec import parse
from dtprobe.readers.nccl_ring import SCHEMA, read_nccl_ring

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "injectors" / "nccl"
LIMIT_S = 60.0
Steps = Sequence[Sequence[Any]]


@pytest.fixture(scope="session")
def module() -> ModuleType:
    """injectors/nccl/injector.py"""
    found, broken = catalog.injectors()
    assert not [entry for entry in broken if entry.folder.name == "nccl"]
    return sys.modules[found["nccl"].make.__module__]


@dataclass(frozen=True)
class Libraries:
    shim: Path
    fake: Path


@pytest.fixture(scope="session")
def libraries(module: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    folder = tmp_path_factory.mktemp("nccl")
    build = module.build
    shim = build.library("libdtprobe-nccl.so", build.SHIM_SOURCES, flags=("-Werror",), folder=folder)
    fake = build.library(
        "libnccl.so.2", (FOLDER / "testing" / "fakenccl.c",), flags=("-Werror", "-Wl,-soname,libnccl.so.2"), folder=folder
    )
    for one in (shim, fake):
        if isinstance(one, Unavailable):
            pytest.fail(str(one))
    return Libraries(shim, fake)


@dataclass
class Job:
    """Ranks of one job; `folder` is the arm's, where rings and logs go."""

    folder: Path
    shared: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    collected: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def finish(self) -> dict[int, list[dict[str, Any]]]:
        """What each rank printed, once all have ended by themselves with exit code 0."""
        for rank, process in enumerate(self.processes):
            out, err = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, f"rank {rank}: exit {process.returncode}: {err}"
            self.collected[rank] = [json.loads(line) for line in out.splitlines()]
        return self.collected

    def ring(self, rank: int) -> pd.DataFrame:
        paths = sorted((self.folder / f"rank{rank}").glob("nccl-*.ring"))
        frames = [read_nccl_ring(path) for path in paths]
        return pd.concat(frames, ignore_index=True) if frames else SCHEMA.empty()

    def rings(self) -> pd.DataFrame:
        return pd.concat([self.ring(rank) for rank in range(len(self.processes))], ignore_index=True)

    def hangs(self, rank: int, seq: int = 1) -> Callable[[], bool]:
        """Whether the rank is inside its collective number `seq` (it may yet be inside its init, waiting for the others)."""
        return lambda: bool((self.ring(rank).query("kind == 'collective' and in_flight")["seq"] == seq).any())

    def log(self, kind: str) -> list[dict[str, Any]]:
        lines = [
            json.loads(line)
            for path in sorted([*self.folder.glob("nccl-*.jsonl"), *self.folder.glob("rank*/nccl-*.jsonl")])
            for line in path.read_text("ascii").splitlines()
        ]
        return [line for line in lines if line["kind"] == kind]

    def fired(self) -> list[tuple[int, str, int]]:
        """(rank, call, number of the matching call) of every firing."""
        return sorted((line["rank"], line["call"], line["nth"]) for line in self.log("fired"))

    def eventually(self, true: Callable[[], bool], what: str) -> None:
        """Waits, bounded, until something outside of this process has come about."""
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline, f"never: {what}"
            assert all(process.poll() in (None, 0) for process in self.processes), f"a rank died before: {what}"
            time.sleep(0.02)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate(timeout=LIMIT_S)


Start = Callable[..., Job]


@pytest.fixture
def start(module: ModuleType, libraries: Libraries, tmp_path: Path) -> Iterator[Start]:
    """`start({rank: steps} or steps for all, *faults, world_size=2, ...)`: ranks under the shim with a plan of these faults."""
    jobs: list[Job] = []

    def start(
        steps: Steps | Mapping[int, Steps],
        *faults: str,
        world_size: int = 2,
        plan: str | None = None,
        seed: int = 1,
        environ: Mapping[str, str] | None = None,
        ranked: bool = True,
        program: Sequence[str] = (),
        shim: bool = True,
    ) -> Job:
        place = tmp_path / f"job{len(jobs)}"
        job = Job(place / "arm", place / "shared")
        jobs.append(job)
        job.folder.mkdir(parents=True)
        job.shared.mkdir()
        known, _ = catalog.injectors()
        lines = [module.plan_line(parse(fault, known), seed, index) for index, fault in enumerate(faults)]
        file = place / "faults.plan"
        file.write_text(plan if plan is not None else module.PLAN_HEAD + "".join(f"{line}\n" for line in lines))
        for rank in range(world_size):
            own = steps[rank] if isinstance(steps, Mapping) else steps
            variables = {
                **{name: value for name, value in os.environ.items() if name not in ("RANK", "LD_PRELOAD", "SLURM_PROCID")},
                "TEST_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "SHARED": str(job.shared),
                "LIBNCCL": str(libraries.fake),
                "DTPROBE_NCCL_PLAN": str(file),
                "DTPROBE_NCCL_FOLDER": str(job.folder),
                **({"RANK": str(rank)} if ranked else {}),
                **({"LD_PRELOAD": str(libraries.shim)} if shim else {}),
                **(environ or {}),
            }
            command = [*(program or (sys.executable, str(Path(__file__).with_name("rank.py")))), json.dumps(own)]
            job.processes.append(
                subprocess.Popen(
                    command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        return job

    yield start
    for job in jobs:
        job.kill()
