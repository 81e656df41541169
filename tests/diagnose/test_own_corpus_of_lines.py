"""Cases of our own for modes that a line of a log shows: mode, rank, decisive line, no innocent rank; and what decides them."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from dtprobe.diagnose import diagnose

CORPUS = Path(__file__).resolve().parents[1] / "corpus" / "logs"
CASES = sorted(one.parent.name for one in CORPUS.glob("6*/truth.toml"))


def _answer(name: str, folder: Path):
    shutil.copytree(CORPUS / name, folder, ignore=shutil.ignore_patterns("truth.toml"))
    return diagnose([folder])


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_diagnosed(name, tmp_path):
    truth = tomllib.loads((CORPUS / name / "truth.toml").read_text())
    job = tmp_path / "job"
    answer = _answer(name, job)
    assert answer.failure_mode in [truth["failure_mode"], *truth.get("accept", [])], answer.because
    first = truth["first_failing_rank"]
    if isinstance(first, int) and first >= 0:
        assert answer.first_failing_rank == first
        assert set(answer.suspects) <= {first, *truth.get("tolerated", [])}
    elif first == "all":
        assert answer.first_failing_rank == "all"
    if decisive := truth.get("decisive_evidence"):
        texts = [one.text for one in answer.evidence]
        assert any(decisive in text for text in texts), texts


@pytest.mark.parametrize(
    ("name", "file", "mode"),
    [
        ("629-translated-peer-copies", "dmesg.out", "p2p-iommu-hang"),
        ("631-firmware-stops-answering", "dmesg.log", "gpu-gsp-timeout"),
        ("622-pod-evicted-for-its-disk", "events.txt", "k8s-pod-evicted"),
    ],
)
def test_without_the_file_that_tells_the_cause_another_answer_is_given(name, file, mode, tmp_path):
    job = tmp_path / "job"
    shutil.copytree(CORPUS / name, job, ignore=shutil.ignore_patterns("truth.toml", file))
    assert diagnose([job]).failure_mode != mode
