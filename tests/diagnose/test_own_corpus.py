"""Every log case of our own corpus is answered with its mode, its rank, its decisive line, and without an innocent rank."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from dtprobe.diagnose import diagnose

CORPUS = Path(__file__).resolve().parents[1] / "corpus" / "logs"
CASES = sorted(one.parent.name for one in CORPUS.glob("5*/truth.toml"))


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_diagnosed(name, tmp_path):
    truth = tomllib.loads((CORPUS / name / "truth.toml").read_text())
    job = tmp_path / "job"
    shutil.copytree(CORPUS / name, job, ignore=shutil.ignore_patterns("truth.toml"))
    answer = diagnose([job])
    assert answer.failure_mode in [truth["failure_mode"], *truth.get("accept", [])], answer.because
    assert not [text for text in answer.missing if "could not judge" in text]
    first = truth["first_failing_rank"]
    fine = {*truth.get("suspects", [first]), *truth.get("tolerated", [])}
    if "suspects" in truth or (isinstance(first, int) and first >= 0):
        assert set(answer.suspects) <= fine
    if isinstance(first, int) and first >= 0:
        assert answer.first_failing_rank == first
    if decisive := truth.get("decisive_evidence"):
        texts = [one.text for one in answer.evidence] + [
            (job / one.file).read_text().split("\n")[one.line - 1] for one in answer.evidence if one.line
        ]
        assert any(decisive in text for text in texts), texts
