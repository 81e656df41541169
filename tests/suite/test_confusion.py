"""A fault arm as a bare folder: what is kept, what is left out, and what the page says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dtprobe.suite import confusion

BASE_NS = 1_790_000_000_000_000_000


def run(folder: Path, name: str, mode: str, *, started: int = 1, exits: tuple[int | None, ...] = (1, 1)) -> Path:
    """A run folder of one fault arm in which rank 1 raises and rank 0 loses its connection."""
    made = folder / name / str(started)
    ranks = [
        {"rank": rank, "pid": 70 + rank, "exit_code": code, "signal": None, "wall_s": 2.0 - rank}
        for rank, code in enumerate(exits)
    ]
    record = {"scenario": name, "variant": "", "failure_mode": mode, "started_ns": started, "versions": {"torch": "2.13.0"}}
    made.mkdir(parents=True)
    (made / "run.json").write_text(json.dumps(record | {"arm_runs": [{"arm": "fault", "repeat": 0, "ranks": ranks}]}))
    (made / "verdict.json").write_text(json.dumps({"failure_mode": mode}))
    texts = {0: "Connection closed by peer [198.51.100.1]:9", 1: "bad label"}
    for rank, text in texts.items():
        own = made / "fault" / "0" / f"rank{rank}"
        own.mkdir(parents=True)
        error = "RuntimeError" if rank == 0 else "ValueError"
        moments = [
            {"t_ns": BASE_NS, "kind": "begun", "rank": rank, "pid": 70 + rank, "what": "step", "try": 0},
            {
                "t_ns": BASE_NS + 10**9 * (2 - rank),
                "kind": "attempt",
                "rank": rank,
                "pid": 70 + rank,
                "what": "step",
                "took_s": 1,
                "error": error,
                "text": text,
                "try": 0,
            },
        ]
        (own / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in moments))
        (own / "stderr.log").write_text(f'  File "/opt/tool/scenarios/{name}/worker.py", line 3, in main\n{error}: {text}\n')
        (own / "injected.jsonl").write_text('{"kind": "fired"}\n')
        (own / "process.json").write_text('{"argv": ["--fault"]}')
    return made


def test_the_run_s_own_account_is_left_out(tmp_path: Path) -> None:
    made = run(tmp_path / "runs", "a-known-fault", "python-exception-one-rank")
    record = json.loads((made / "run.json").read_text())
    confusion.bare(record, made / "fault" / "0", tmp_path / "job")
    names = sorted(str(path.relative_to(tmp_path / "job")) for path in (tmp_path / "job").rglob("*") if path.is_file())
    assert names == ["launcher.log", "rank0/events.jsonl", "rank0/stderr.log", "rank1/events.jsonl", "rank1/stderr.log"]
    text = "".join((tmp_path / "job" / name).read_text() for name in names)
    assert "a-known-fault" not in text and "scenarios" not in text
    assert '"/job/worker.py", line 3' in text
    assert (tmp_path / "job" / "launcher.log").read_text().splitlines() == [
        "failed (exitcode: 1) local_rank: 1 (pid: 71) of binary: python",
        "failed (exitcode: 1) local_rank: 0 (pid: 70) of binary: python",
    ]


def test_of_several_runs_of_a_scenario_the_latest_counts(tmp_path: Path) -> None:
    for started in (1, 3, 2):
        run(tmp_path, "one", "rank-killed", started=started)
    run(tmp_path, "two", "rank-killed")
    assert [(record["scenario"], record["started_ns"]) for record, _ in confusion.arms([tmp_path])] == [("one", 3), ("two", 1)]


def test_the_page_counts_what_is_right_and_says_what_is_taken_for_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "runs", "right", "python-exception-one-rank")
    run(tmp_path / "runs", "wrong", "slow-collective-path")
    page = tmp_path / "page.md"
    assert confusion.main([str(tmp_path / "runs"), "--out", str(page)]) == 1
    text = page.read_text()
    assert "**1 diagnosed as their own mode, 0 undetermined, 1 taken for another mode.**" in text
    assert "| `right` | `python-exception-one-rank` | right | 1 |" in text
    assert "| `slow-collective-path` | `python-exception-one-rank` | 1 |" in text
    assert "- wrong: python-exception-one-rank (slow-collective-path)" in capsys.readouterr().err


def test_folders_without_a_run_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert confusion.main([str(tmp_path)]) == 2
    assert "no run with a fault arm" in capsys.readouterr().err


ITSELF = ("rank-killed", "rank-stopped", "python-exception-one-rank", "gil-held")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ITSELF)
def test_a_fault_arm_is_diagnosed_as_its_own_mode(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", "dtprobe", "run", name, "--arm", "fault", "--repeats", "1", "--out", str(tmp_path)]
    subprocess.run(command, check=False, capture_output=True, timeout=180)
    (row,) = confusion.rows([tmp_path])
    assert (row.diagnosis.failure_mode, row.diagnosis.first_failing_rank) == (name, 1)
