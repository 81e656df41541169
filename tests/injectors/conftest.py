"""Jobs under faults: a small launcher that stands for somebody's own, ranks that are a few lines of Python, and what became of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtprobe import armrun, catalog
from dtprobe.armrun import ArmPlan, ArmRecord, Workload
from dtprobe.clock import SystemClock
from dtprobe.confine import Confinement
from dtprobe.inject import Firing
from dtprobe.inject.spec import parse
from dtprobe.launch.command import Command
from dtprobe.launch.local import Local

LIMIT_S = 90.0
ROOT = Path(__file__).resolve().parents[2]

LAUNCHER = """
import os, subprocess, sys, threading
from pathlib import Path
shared = Path(os.environ["SHARED"])
def one(rank):
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": sys.argv[1], "LOCAL_RANK": str(rank)}
    process = subprocess.Popen(sys.argv[2:], env=env)
    (shared / f"pid-{rank}").write_text(str(process.pid))
    code = process.wait()
    (shared / f"ended-{rank}.new").write_text(str(code))
    (shared / f"ended-{rank}.new").rename(shared / f"ended-{rank}")
threads = [threading.Thread(target=one, args=(rank,)) for rank in range(int(sys.argv[1]))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""

PREAMBLE = f"""
import os, sys, time
from pathlib import Path
rank, shared = int(os.environ.get("RANK", 0)), Path(os.environ["SHARED"])
def until(true, limit_s={LIMIT_S}):
    give_up = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > give_up:
            sys.exit("gave up")
        time.sleep(0.01)
def say(*words):
    with (shared / f"said-{{rank}}").open("a") as file:
        print(*words, file=file)
def ended(other):
    return (shared / f"ended-{{other}}").exists()
"""


@dataclass
class Job:
    """Faults, a command, and where its ranks leave what they say."""

    shared: Path
    record: ArmRecord | None = None
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def environ(self) -> dict[str, str]:
        foreign = ("RANK", "WORLD_SIZE", "LD_PRELOAD", "SLURM_PROCID")
        kept = {name: value for name, value in os.environ.items() if name not in foreign}
        return kept | {"XDG_STATE_HOME": str(self.shared / "state"), "SHARED": str(self.shared), **self.extra}

    def command(self, code: str, ranks: int = 2) -> list[str]:
        """Somebody's launcher with `ranks` ranks of that Python code."""
        (self.shared / "rank.py").write_text(PREAMBLE + code)
        return self.launching(sys.executable, str(self.shared / "rank.py"), ranks=ranks)

    def launching(self, *argv: str, ranks: int = 2) -> list[str]:
        (self.shared / "launcher.py").write_text(LAUNCHER)
        return [sys.executable, "-I", str(self.shared / "launcher.py"), str(ranks), *argv]

    def run(self, texts: Sequence[str] | str, argv: Sequence[str], *, seed: int = 0, timeout_s: float = LIMIT_S) -> ArmRecord:
        """The command under the faults, without recorders."""
        workload = Workload(tuple(argv), self.shared, timeout_s, None)
        return self._execute(texts, workload, Command(), seed)

    def run_local(self, texts: Sequence[str] | str, code: str, *, ranks: int = 2, seed: int = 0) -> ArmRecord:
        """Ranks of our own launcher under the faults, without recorders."""
        (self.shared / "rank.py").write_text(PREAMBLE + code)
        argv = (sys.executable, str(self.shared / "rank.py"))
        return self._execute(texts, Workload(argv, self.shared, LIMIT_S, ranks), Local(), seed)

    def _execute(self, texts: Sequence[str] | str, workload: Workload, launcher: Any, seed: int) -> ArmRecord:
        known, broken = catalog.injectors()
        assert not broken
        faults = tuple(parse(text, known) for text in ([texts] if isinstance(texts, str) else texts))
        self.shared.joinpath("state").mkdir(exist_ok=True)
        number = sum(1 for _ in self.shared.glob("arm-*"))
        with Confinement.open(f"test-{os.getpid()}-{time.monotonic_ns()}", environ=self.environ) as box:
            self.record = armrun.execute(
                box,
                ArmPlan("fault", workload, 0, traced=False, probed=True, faults=faults),
                folder=self.shared / f"arm-{number}",
                probes=(),
                launcher=launcher,
                seed=seed,
                environ=self.environ,
                clock=SystemClock(),
            )
        assert not box.problems
        return self.record

    def fired(self, index: int = 0) -> tuple[Firing, ...]:
        assert self.record is not None
        return self.record.injected[index].fired

    def problems(self, index: int = 0) -> str:
        assert self.record is not None
        return "; ".join(self.record.injected[index].problems)

    def where(self, index: int = 0) -> list[tuple[int | None, int | None]]:
        """Rank and call number of each firing."""
        return [(one.rank, one.nth) for one in self.fired(index)]

    def said(self, rank: int = 0) -> list[str]:
        path = self.shared / f"said-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def exit_of(self, rank: int) -> int | None:
        """How the launcher saw the rank end: its exit code, or minus the signal."""
        path = self.shared / f"ended-{rank}"
        return int(path.read_text()) if path.exists() else None

    def log(self, name: str = "launcher/stderr.log") -> str:
        assert self.record is not None
        return (self.record.folder / name).read_text()

    def cli(self, *words: str) -> subprocess.Popen[str]:
        """`dtprobe inject` as a user starts it; `--json` is asked for, runs go below `shared`."""
        at = words.index("--")
        before, argv = words[:at], words[at + 1 :]
        return subprocess.Popen(
            [sys.executable, "-m", "dtprobe", "inject", *before, "--json", "--out", str(self.shared / "runs"), "--", *argv],
            env=self.environ | {"PYTHONPATH": str(ROOT)},
            cwd=self.shared,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def refused(self, fault: str, *more: str) -> str:
        """The one line with which `dtprobe inject FAULT -- CMD` refuses, exit 2, the command never started."""
        touched = self.shared / "started"
        process = self.cli(fault, *more, "--", "touch", str(touched))
        out, err = process.communicate(timeout=LIMIT_S)
        lines = [line for line in err.splitlines() if line.startswith("dtprobe: ")]
        assert process.returncode == 2, (process.returncode, err)
        assert not out and len(lines) == 1 and "Traceback" not in err
        assert not touched.exists()
        return lines[0]

    def processes(self) -> list[psutil.Process]:
        """What of this job still runs: everything that has its SHARED in the environment, but this process."""
        found = []
        for one in psutil.process_iter(["environ", "status"]):
            environ = one.info["environ"] or {}
            if environ.get("SHARED") == str(self.shared) and one.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(one)
        return found


def eventually(true: Callable[[], Any], what: str = "") -> Any:
    """Waits until something is true, generously; what it was."""
    give_up = time.monotonic() + LIMIT_S
    while not (found := true()):
        assert time.monotonic() < give_up, what or "gave up"
        time.sleep(0.02)
    return found


@pytest.fixture(name="eventually")
def eventually_() -> Callable[..., Any]:
    return eventually


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def killed(job: Job) -> Iterator[Callable[..., None]]:
    """Starts `dtprobe inject`, waits until something has happened, kills the harness, and waits until all of it is gone."""
    started: list[subprocess.Popen[str]] = []

    def kill(words: Sequence[str], when: Callable[[], Any]) -> None:
        process = job.cli(*words)
        started.append(process)
        eventually(lambda: when() or process.poll() is not None, "the fault acts")
        assert process.poll() is None, process.communicate()[1]
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)
        eventually(lambda: not job.processes(), "everything of the job ends")
        eventually(lambda: not list((job.shared / "state").rglob("*.jsonl")), "the ledger is undone")

    yield kill
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()
