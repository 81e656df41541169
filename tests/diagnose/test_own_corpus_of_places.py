"""Cases of our own about whose line it is: layouts of files, prefixes, nodes, pods, tables and attempts."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from dtprobe.diagnose import diagnose

CORPUS = Path(__file__).resolve().parents[1] / "corpus" / "logs"
CASES = sorted(one.parent.name for one in CORPUS.glob("7[0-3]*/truth.toml"))


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_diagnosed(name, tmp_path):
    truth = tomllib.loads((CORPUS / name / "truth.toml").read_text())
    job = tmp_path / "job"
    shutil.copytree(CORPUS / name, job, ignore=shutil.ignore_patterns("truth.toml"))
    answer = diagnose([job])
    assert answer.failure_mode in [truth["failure_mode"], *truth.get("accept", [])], answer.because
    first = truth["first_failing_rank"]
    assert answer.first_failing_rank == (None if first == -1 else first)
    if first not in (-1, "all"):
        assert set(answer.suspects) <= {first, *truth.get("tolerated", [])}
    texts = [one.text for one in answer.evidence]
    assert any(truth["decisive_evidence"] in text for text in texts), texts
