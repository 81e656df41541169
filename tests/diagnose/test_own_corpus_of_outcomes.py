"""Cases of our own of what became of a job: healthy ones with frightening noise, logs that stand still, ranks that left or ran on."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from dtprobe.diagnose import diagnose

CORPUS = Path(__file__).resolve().parents[1] / "corpus" / "logs"
CASES = sorted(one.parent.name for one in CORPUS.glob("7[5-7]?-*/truth.toml"))


def _answer(name: str, folder: Path, *without: str):
    shutil.copytree(CORPUS / name, folder, ignore=shutil.ignore_patterns("truth.toml", *without))
    return diagnose([folder])


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_diagnosed(name, tmp_path):
    truth = tomllib.loads((CORPUS / name / "truth.toml").read_text())
    answer = _answer(name, tmp_path / "job")
    assert answer.failure_mode in [truth["failure_mode"], *truth.get("accept", [])], answer.because
    first = truth["first_failing_rank"]
    assert answer.first_failing_rank == (None if first == -1 else first)
    assert set(answer.suspects) <= ({first} if first != -1 else set())


def _rewritten(name: str, folder: Path, file: str, keep):
    shutil.copytree(CORPUS / name, folder, ignore=shutil.ignore_patterns("truth.toml"))
    path = folder / file
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if keep(line)))
    return diagnose([folder])


@pytest.mark.parametrize(
    ("name", "file", "end"),
    [
        ("750-cable-reseated-while-training", "job.out", ("done", "bye")),
        ("755-restarted-once-and-finished", "agent.err", ("successfully",)),
    ],
)
def test_the_same_trouble_is_not_got_over_where_nobody_says_that_the_job_ended(name, file, end, tmp_path):
    answer = _rewritten(name, tmp_path / "job", file, lambda line: not any(one in line for one in end))
    assert answer.failure_mode != "healthy"


def test_a_kill_in_the_job_s_own_time_counts(tmp_path):
    job = tmp_path / "job"
    shutil.copytree(CORPUS / "756-kill-of-a-notebook-before", job, ignore=shutil.ignore_patterns("truth.toml"))
    (job / "dmesg.txt").write_text((job / "dmesg.txt").read_text().replace("Sun Aug  3 22:00:11", "Fri Aug  8 09:00:05"))
    log = (job / "slurm.out").read_text().splitlines(keepends=True)
    (job / "slurm.out").write_text("".join(line for line in log if "done" not in line))
    assert diagnose([job]).failure_mode == "host-oom-kill"


def test_a_loader_worker_s_kill_is_the_kernel_s_only_where_the_kernel_says_so(tmp_path):
    answer = _answer("774-loader-worker-killed-with-the-kernel-s-word", tmp_path / "job", "kern.txt")
    assert (answer.failure_mode, answer.first_failing_rank) == ("python-exception-one-rank", 1)


def test_a_rank_that_had_to_be_told_to_end_had_not_ended_with_success(tmp_path):
    job = tmp_path / "job"
    shutil.copytree(CORPUS / "771-left-with-code-0", job, ignore=shutil.ignore_patterns("truth.toml"))
    log = (job / "c.log").read_text().splitlines(keepends=True)
    at = next(number for number, line in enumerate(log) if "closing signal" in line)
    log.insert(at, log[at].replace("911", "913"))
    (job / "c.log").write_text("".join(log))
    assert diagnose([job]).failure_mode != "peer-exited-early"
