"""Nights in all states."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from dtprobe.site import nights


def test_each_state_is_told_from_the_others(runs: Path, made: ModuleType) -> None:
    found = nights.listed(runs)
    assert [night.state for night in found] == ["unreadable", "cut-off"] + ["finished"] * made.NIGHTS
    assert found[2].headline == "1 not as expected of 2"
    assert found[3].headline == "2 of 2 scenarios as expected"
    assert found[2].rows()[0]["scenario"] == made.GOOD  # what is wrong comes first


def test_a_night_whose_process_lives_is_running(tmp_path: Path, made: ModuleType) -> None:
    me = psutil.Process(os.getpid())
    made.progress(tmp_path, me.pid, me.create_time(), [made.row("a", "x")])
    (night,) = nights.listed(tmp_path)
    assert (night.state, night.done, night.total, night.running) == ("running", 1, 4, (made.GOOD,))
    made.progress(tmp_path, me.pid, me.create_time() - 100, [])  # the same pid, another process
    assert nights.listed(tmp_path)[0].state == "cut-off"


def test_a_night_that_was_written_again_is_read_again(tmp_path: Path, made: ModuleType) -> None:
    folder = made.summary(tmp_path, 1, [made.row("a", "x")])
    first = nights.listed(tmp_path)
    assert nights.listed(tmp_path, first)[0] is first[0]
    data = json.loads((folder / "summary.json").read_text())
    data["scenarios"][0]["status"] = "failed"
    (folder / "summary.json").write_text(json.dumps(data))
    os.utime(folder / "summary.json", ns=(1, 1))
    assert nights.listed(tmp_path, first)[0].headline == "1 failed of 1"


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"scenarios": 3, "began_ns": 1, "took_s": 1, "well": true}', '{"began_ns": "x"}', "\x00"]
)
def test_a_summary_of_another_form_is_unreadable_with_a_reason(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "suites" / "20251021T000000Z-9"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(text)
    (night,) = nights.listed(tmp_path)
    assert night.state == "unreadable" and night.problem
    assert night.rows() == []
