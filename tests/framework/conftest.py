"""A job of real processes for the tests of the framework: each rank runs a piece of Python and says what it found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_PRELUDE = '''
import datetime, gc, json, os, signal, sys, time
import psutil
import torch
import torch.distributed as dist
RANK, SIZE = int(os.environ.get("RANK", -1)), int(os.environ.get("WORLD_SIZE", -1))

def say(**facts):
    sys.stdout.write("say " + json.dumps(facts) + chr(10))
    sys.stdout.flush()

def held():
    """Threads and descriptors of this process."""
    me = psutil.Process()
    return [me.num_threads(), me.num_fds()]

def seconds(count):
    return datetime.timedelta(seconds=count)

def plain(timeout_s=20):
    dist.init_process_group("gloo", timeout=seconds(timeout_s))

def caught(call):
    """What a call raised, as facts."""
    begun = time.monotonic()
    try:
        call()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "ranks": list(getattr(error, "ranks", ())),
                "decided": getattr(error, "decided", None), "fields": sorted(getattr(error, "differences", {})),
                "took_s": time.monotonic() - begun}
    return {"error": None, "took_s": time.monotonic() - begun}
'''


@dataclass(frozen=True)
class Ended:
    """A rank that ended: its exit status, what it said in order, and its output for the message of a failing test."""

    rank: int
    code: int
    said: list[dict[str, Any]]
    output: str

    @property
    def only(self) -> dict[str, Any]:
        """The one thing it said."""
        assert self.code == 0 and len(self.said) == 1, self.output
        return self.said[0]


Run = Callable[..., list[Ended]]


def clean_environment() -> dict[str, str]:
    """This environment without anything a launcher may have put there."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "OMPI_", "PMI", "PRTE_", "TORCHELASTIC_", "PET_", "MASTER_", "KUBERNETES_"))
        and name
        not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "JOB_COMPLETION_INDEX")
    } | {
        "RES_OPTIONS": "timeout:1 attempts:1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def zygote() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported torch and forks ranks on demand (see zygote.py)."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("zygote.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_environment(),
        text=True,
        bufsize=1,
    )
    assert process.stdin
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(60)


@pytest.fixture
def job(tmp_path: Path, zygote: subprocess.Popen[str]) -> Run:
    """Run `source` as processes with RANK and its kin set; `environ(rank)` changes them (None removes). All have ended after it."""

    def run(
        source: str,
        *,
        world_size: int = 2,
        processes: int | None = None,
        environ: Callable[[int], Mapping[str, str | None]] = lambda rank: {},
        timeout_s: float = 90.0,
    ) -> list[Ended]:
        program = tmp_path / "program.py"
        program.write_text(_PRELUDE + source, encoding="utf-8")
        port = str(free_port())
        ranks = []
        for rank in range(processes or world_size):
            variables = clean_environment() | {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                **environ(rank),
            }
            known = {name: value for name, value in variables.items() if value is not None}
            ranks.append({"env": known, "output": str(tmp_path / f"rank{rank}.log")})
        assert zygote.stdin and zygote.stdout
        zygote.stdin.write(
            json.dumps({"program": str(program), "cwd": str(tmp_path), "timeout_s": timeout_s, "ranks": ranks}) + "\n"
        )
        codes = json.loads(zygote.stdout.readline())
        return [ended(rank, code, tmp_path / f"rank{rank}.log") for rank, code in enumerate(codes)]

    return run


def ended(rank: int, code: int, log: Path) -> Ended:
    """What a rank that ended with `code` said in its log."""
    output = log.read_text(encoding="utf-8", errors="replace")
    return Ended(rank, code, [json.loads(line[4:]) for line in output.splitlines() if line.startswith("say ")], output)


@pytest.fixture
def port() -> int:
    """A port of loopback that was free a moment ago."""
    return free_port()
