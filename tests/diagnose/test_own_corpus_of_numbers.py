"""Cases of our own that numbers, transcripts and logged calls decide: mode, rank, decisive line, no innocent rank."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from dtprobe.diagnose import diagnose

CORPUS = Path(__file__).resolve().parents[1] / "corpus" / "logs"
CASES = sorted(one.parent.name for one in CORPUS.glob("8*/truth.toml"))


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_diagnosed(name, tmp_path):
    truth = tomllib.loads((CORPUS / name / "truth.toml").read_text())
    job = tmp_path / "job"
    shutil.copytree(CORPUS / name, job, ignore=shutil.ignore_patterns("truth.toml"))
    answer = diagnose([job])
    assert answer.failure_mode in [truth["failure_mode"], *truth.get("accept", [])], answer.because
    first = truth["first_failing_rank"]
    assert answer.first_failing_rank == (None if first == -1 else first)
    if isinstance(first, int) and first >= 0:
        assert set(answer.suspects) <= {first, *truth.get("tolerated", [])}
    if decisive := truth.get("decisive_evidence"):
        assert any(decisive in one.text for one in answer.evidence), answer.evidence


@pytest.mark.parametrize(
    ("name", "file", "mode"),
    [
        ("807-stopped-by-job-control", "ps-aux.txt", "rank-stopped"),
        ("808-tokenizer-keeps-the-lock", "dump.txt", "gil-held"),
        ("811-clock-of-one-node-ahead", "timedatectl-n5.txt", "clock-skew"),
        ("816-four-single-worlds-by-mpirun", "o", "nested-launcher"),
        ("817-sockets-beside-an-active-port", "rdma.txt", "slow-collective-path"),
    ],
)
def test_without_the_file_that_tells_the_cause_another_answer_is_given(name, file, mode, tmp_path):
    job = tmp_path / "job"
    shutil.copytree(CORPUS / name, job, ignore=shutil.ignore_patterns("truth.toml", file))
    assert diagnose([job]).failure_mode != mode
