"""A fault arm as a bare folder: what is kept, what is left out, and what the page says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtprobe.catalog import load
from dtprobe.diagnose.diagnosis import Diagnosis
from dtprobe.suite import confusion
from dtprobe.suite.confusion import Outcome, Row
from dtprobe.suite.traces import traces

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
    assert "**1 as the artifacts allow, 0 undetermined, 1 taken for another mode.**" in text
    assert "| `right` | `python-exception-one-rank` | - | its mode |  | right | 1 |" in text
    assert "| `slow-collective-path` | `python-exception-one-rank` | 1 |" in text
    assert "- wrong: python-exception-one-rank (slow-collective-path): taken for another mode" in capsys.readouterr().err


def test_a_run_whose_fault_arm_is_under_way_is_left_out(tmp_path: Path) -> None:
    made = run(tmp_path, "one", "rank-killed")
    record = json.loads((made / "run.json").read_text())
    del record["arm_runs"]
    (made / "run.json").write_text(json.dumps(record))
    assert not list(confusion.arms([tmp_path]))


def answer(mode: str) -> Diagnosis:
    return Diagnosis(
        failure_mode=mode,
        group="",
        locus="",
        first_failing_rank=None,
        host=None,
        suspects=(),
        confidence=0.5,
        because="",
        evidence=(),
        missing=(),
        fix="",
        scenario=None,
    )


@pytest.mark.parametrize(
    ("said", "facts", "outcome"),
    [
        ("init-order", {}, Outcome.RIGHT),
        ("rendezvous-timeout", {"looks_like": ("rendezvous-timeout",)}, Outcome.ALIKE),
        ("rendezvous-timeout", {}, Outcome.WRONG),
        ("undetermined", {"silent": True}, Outcome.SILENT),
        ("healthy", {"silent": True, "verdict": "reproduced"}, Outcome.WRONG),
        ("undetermined", {}, Outcome.UNDETERMINED),
        ("healthy", {"verdict": "refuted", "failed": False}, Outcome.NOTHING),
        ("healthy", {"verdict": "refuted", "failed": True}, Outcome.WRONG),
        ("healthy", {"verdict": "reproduced", "failed": False}, Outcome.WRONG),
        ("sigabrt", {"verdict": "refuted", "failed": False}, Outcome.WRONG),
    ],
)
def test_how_a_diagnosis_stands_to_its_arm(said: str, facts: dict[str, Any], outcome: Outcome) -> None:
    row = Row(name="x", truth="init-order", diagnosis=answer(said), **facts)
    assert row.outcome is outcome
    assert row.right is (outcome in confusion.GOOD)


def arm(folder: Path, *, value: float, error: str = "", line: str = "", op: str = "all_reduce") -> Path:
    own = folder / "rank0"
    own.mkdir(parents=True)
    moment = {"t_ns": BASE_NS + int(value), "kind": "attempt", "rank": 0, "what": "step", "error": error, "value": value}
    (own / "events.jsonl").write_text(json.dumps(moment) + "\n")
    (own / "stderr.log").write_text(f"loss {value}\n{line}\n")
    entry = {
        "collective_seq_id": 1,
        "profiling_name": f"gloo:{op}",
        "process_group": ["0", "default_pg"],
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "time_created_ns": BASE_NS + int(value),
        "is_p2p": False,
        "retired": True,
        "state": "scheduled",
    }
    (own / "fr-0.json").write_text(json.dumps({"version": "2.10", "entries": [entry]}))
    return folder


@pytest.mark.parametrize(
    ("changed", "same"), [({}, True), ({"error": "ValueError"}, False), ({"line": "oh"}, False), ({"op": "broadcast"}, False)]
)
def test_arms_that_differ_in_values_alone_leave_the_same(tmp_path: Path, changed: dict[str, Any], same: bool) -> None:
    ranks = [{"rank": 0, "exit_code": 0, "signal": None}]
    control = traces(arm(tmp_path / "control", value=3.0), ranks)
    fault = traces(arm(tmp_path / "fault", value=201.0, **changed), ranks)
    assert (fault <= control) is same
    assert not traces(tmp_path / "control", [{"rank": 0, "exit_code": 1, "signal": None}]) <= control


def test_folders_without_a_run_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert confusion.main([str(tmp_path)]) == 2
    assert "no run with a fault arm" in capsys.readouterr().err


SILENT = frozenset(
    {
        "correctness-check",
        "noncontiguous-collective",
        "pipeline-timeout:swapped",
        "read-before-wait:overwritten",
        "read-before-wait:sent",
        "rdma-contention:frames",
        "rdma-contention:strict-priority",
        "reduce-op-mismatch",
    }
)
"""Nothing but values tells these arms from healthy ones: `undetermined` is right."""
ALIKE = frozenset(
    {
        "clock-skew",
        "rdma-contention:peer-killed",
        "rdma-contention:link-down",
        "dropped-isend",
        "gradient-loss:sharded",
        "init-order:late-store",
        "init-order:world-size-too-large",
    }
)
"""Another mode leaves the same evidence."""
NOTHING = frozenset({"misaligned-fp16", "staged-all-gather"})
"""The claim is refuted and nothing fails."""
OPEN: frozenset[str] = frozenset()
"""Arms that the diagnosis does not decide, though they leave more than values: to be taken from this list, not added to."""
WRONG: frozenset[str] = frozenset()
"""Arms that are taken for another mode: likewise."""
PAGE = Path(__file__).parents[2] / "docs" / "confusion.md"


def expected(name: str) -> Outcome:
    """Every arm that is named in none of the sets must be right."""
    sets = {
        Outcome.SILENT: SILENT,
        Outcome.ALIKE: ALIKE,
        Outcome.NOTHING: NOTHING,
        Outcome.UNDETERMINED: OPEN,
        Outcome.WRONG: WRONG,
    }
    return next((outcome for outcome, names in sets.items() if name in names), Outcome.RIGHT)


def page_rows() -> dict[str, str]:
    rows = (line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `"))
    return {cells[0].strip("| `"): cells[5] for cells in rows if len(cells) == 8}


def test_the_page_shows_each_arm_with_the_outcome_that_is_expected_of_it() -> None:
    shown = page_rows()
    assert shown == {name: str(expected(name)) for name in shown}
    assert shown
    assert set(shown) <= {one.id for one in load().scenarios}


def test_the_page_holds_no_path_of_the_machine_that_made_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"/(?:tmp|root|home|work)/", text)


DECIDED = sorted({one.id for one in load().scenarios} - SILENT - NOTHING - OPEN - WRONG)


@pytest.mark.nightly
@pytest.mark.parametrize("name", DECIDED)
def test_a_fault_arm_is_diagnosed_as_its_own_mode(tmp_path: Path, name: str) -> None:
    """Or as one that leaves the same evidence, where its author says so."""
    command = [sys.executable, "-m", "dtprobe", "run", name, "--arm", "fault", "--repeats", "1", "--out", str(tmp_path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=400)
    rows = list(confusion.rows([tmp_path]))
    if not rows:
        pytest.skip(f"its fault arm does not run here: {ended.stderr.strip().splitlines()[-1:]}")
    (row,) = rows
    assert row.outcome in (Outcome.RIGHT, Outcome.ALIKE), f"{row.diagnosis.failure_mode}: {row.diagnosis.because}"
