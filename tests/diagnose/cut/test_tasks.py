"""Shares read by real processes: of this machine, one of them killed in mid-run, and on the nodes of a real Slurm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from flight_jobs import Look, edited, fsdp, hsdp, run, without, write

from dtprobe.diagnose import diagnose
from dtprobe.diagnose.cut import VERB
from dtprobe.engines import named
from dtprobe.scratch import HIDDEN

from .conftest import in_shares, local, told


def postmortem(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dtprobe", "postmortem", *arguments, "--json"]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Rank 5 of eight leaves out a call; logs of all."""
    made = edited(fsdp(8, 6), 5, without(20))
    write(tmp_path / "job", made, run(made), Look())
    for rank in range(8):
        (tmp_path / "job" / f"worker{rank}.log").write_text(f"2025-03-03 10:00:00 [rank{rank}]: step 3\n" * 20)
    return tmp_path / "job"


def test_the_command_line_says_the_same_to_the_letter_and_leaves_nothing(job: Path) -> None:
    """Relative paths, as people type them."""
    whole = postmortem("job", cwd=job.parent)
    shares = postmortem("job", "--on", "local:jobs=2", cwd=job.parent)
    assert json.loads(whole.stdout)["first_failing_rank"] == 5
    assert (shares.stdout, shares.returncode) == (whole.stdout, whole.returncode), shares.stderr
    assert [one.name for one in job.parent.iterdir()] == ["job"]
    wrong = postmortem("job", "--on", "slrum", cwd=job.parent)
    assert wrong.returncode == 2 and "no engine is called 'slrum'" in wrong.stderr and not wrong.stdout


def test_what_a_killed_postmortem_left_is_no_artifact_and_goes_with_the_next(job: Path) -> None:
    whole = told(diagnose([job]))
    left = job / f"{HIDDEN}dead" / "parts" / "share-0000"
    left.mkdir(parents=True)
    (left / "worker9.log").write_text("[rank9]: Traceback (most recent call last):\n[rank9]: ValueError: of another job\n")
    assert told(diagnose([job])) == whole
    assert (
        told(in_shares([job], job, 2)) == whole
    )  # partial results among the artifacts themselves, as `postmortem . --on` has them
    assert not [one for one in job.iterdir() if one.is_dir()]


def test_a_worker_killed_in_mid_run_is_replaced_and_one_killed_again_is_named(job: Path) -> None:
    whole = diagnose([job])
    with killer(str(job.parent), times=1) as killed:
        assert told(in_shares([job], job.parent, 3, local())) == told(whole)
    assert len(killed) == 1
    with killer(str(job.parent), times=2) as killed:
        answer = in_shares([job], job.parent, 3, local())
    assert len(killed) == 2
    (lost,) = [one for one in answer.missing if "not read: its task ended by signal 9 (Killed), twice" in one]
    assert lost.startswith("nccl_trace_rank_") and set(whole.missing) < set(answer.missing)
    assert [one.name for one in job.parent.iterdir()] == ["job"]


class killer:
    """Kills, `times` in all, the workers for the last share that are seen to work below a folder."""

    def __init__(self, folder: str, times: int) -> None:
        self._folder, self._times = folder, times
        self._killed: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> list[int]:
        self._thread.start()
        return self._killed

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.01) and len(self._killed) < self._times:
            for child in psutil.Process().children(recursive=True):
                try:
                    ours = f"{self._folder}/" in child.cwd() and "share-0002" in child.cwd() and VERB in child.cmdline()
                    if ours and child.pid not in self._killed:
                        child.send_signal(signal.SIGKILL)
                        self._killed.append(child.pid)
                except psutil.Error:
                    continue


@pytest.fixture
def slurm() -> Iterator[dict[str, str]]:
    from dtprobe.launch.slurm import cluster

    folder = Path(tempfile.mkdtemp(prefix="dtp"))  # paths of sockets are bounded
    try:
        with cluster(folder / "slurm") as told:
            yield {**os.environ, **told}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.needs("slurm", "root")
def test_the_nodes_of_a_real_slurm_give_the_same_answer(slurm: dict[str, str], tmp_path: Path) -> None:
    made = edited(hsdp(4, 2, 5), 6, without(13))
    write(tmp_path / "job", made, run(made), Look())
    engine = named("slurm:partition=main", slurm)
    assert told(in_shares([tmp_path / "job"], tmp_path, 3, engine)) == told(diagnose([tmp_path / "job"]))
    assert [one.name for one in tmp_path.iterdir()] == ["job"]
