"""Runs of other machines: each once, under its own host, whatever form they come in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dtprobe.errors import UsageError
from dtprobe.store import Store, history
from dtprobe.store.merge import merge

START_NS = 1_790_000_000 * 10**9


def run(out: Path, number: int, host: str) -> Path:
    facts = {"machine": {"host": host, "python": "3.11.7"}, "failure_mode": "straggler", "seed": number}
    store = Store.open(out)
    with store.create("slow", "", facts, started_ns=START_NS + number * 10**9) as made:
        metric = {"control": 1.0, "fault": 2.0, "unit": "s"}
        verdict = {"verdict": "partly", "expected": "partly", "as_expected": True, "mitigation": "none", "torch": "2.13.0"}
        made.write_verdict({**verdict, "metrics": {"step": metric}})
        store.finish(made, now_ns=lambda: START_NS + number * 10**9 + 5)
    return made.path


def hosts(out: Path) -> list[str]:
    reading = history(out)
    try:
        return list(reading.sql("SELECT host FROM (SELECT DISTINCT run, host FROM history) ORDER BY host")["host"])
    finally:
        reading.close()


def test_a_folder_of_runs_comes_in_once(tmp_path):
    run(tmp_path / "here", 0, "here")
    for number in (1, 2):
        run(tmp_path / "there", number, "there")
    came = merge([tmp_path / "there"], tmp_path / "here")
    assert (came.new, came.known, came.problems) == (2, 0, ())
    assert hosts(tmp_path / "here") == ["here", "there", "there"]
    again = merge([tmp_path / "there", tmp_path / "there" / "history"], tmp_path / "here")
    assert (again.new, again.known) == (0, 2) and len(hosts(tmp_path / "here")) == 3


def test_a_run_folder_alone_comes_in_and_one_without_end_does_not(tmp_path):
    path = run(tmp_path / "there", 1, "there")
    assert merge([path], tmp_path / "here").new == 1 and hosts(tmp_path / "here") == ["there"]
    record = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**record, "state": "unfinished"}))
    with pytest.raises(UsageError, match="no finished run"):
        merge([path], tmp_path / "elsewhere")


def test_what_is_damaged_is_named_and_the_rest_comes_in(tmp_path):
    first, second = (run(tmp_path / "there", number, "there") for number in (1, 2))
    for file in (tmp_path / "there" / "history").glob("*.parquet"):
        file.unlink()
    (first / "run.json").write_text("{ cut")
    came = merge([tmp_path / "there"], tmp_path / "here")
    assert came.new == 1 and len(came.problems) == 1 and str(first) in came.problems[0]
    assert second.exists()


def verb(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dtprobe", "history", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_the_verbs_answer_over_a_merged_history_and_refuse_in_one_line(tmp_path):
    for number in range(3):
        run(tmp_path / "there", number, "there")
    out = str(tmp_path / "here")
    assert "3 runs came in" in verb("merge", str(tmp_path / "there"), "--out", out).stdout
    assert json.loads(verb("overview", "--out", out, "--json").stdout)[0]["runs"] == 3
    nothing = verb("regressions", "--out", out)
    assert (nothing.returncode, nothing.stdout.strip()) == (0, "nothing is worse")
    for words in (("overview", "--out", str(tmp_path)), ("merge", str(tmp_path / "no"), "--out", out)):
        refused = verb(*words)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
