"""What fits into a night."""

from __future__ import annotations

import json

import pytest

from dtprobe.errors import UsageError
from dtprobe.suite import budget

SECONDS = {"short": 10.0, "middle": 60.0, "long": 300.0}


def summary(folder, began_ns, rows):
    folder.mkdir(parents=True)
    told = [{"scenario": name, "status": status, "took_s": took_s, "runs": []} for name, status, took_s in rows]
    (folder / "summary.json").write_text(json.dumps({"schema": "dtprobe.suite/1", "began_ns": began_ns, "scenarios": told}))


def test_earlier_nights_tell_durations_and_what_is_wanted_first(tmp_path):
    summary(tmp_path / "20260101T000000Z-1", 1, [("a", "as-expected", 10.0), ("b", "as-expected", 99.0), ("c", "broken", 7.0)])
    summary(tmp_path / "20260102T000000Z-1", 2, [("a", "as-expected", 30.0), ("b", "left-out", 0.0)])
    (tmp_path / "20260103T000000Z-1").mkdir()
    (tmp_path / "20260103T000000Z-1" / "summary.json").write_text("{ damaged")
    known = budget.known(tmp_path)
    assert (known.expects_s("a"), known.expects_s("b"), known.expects_s("never")) == (20.0, 99.0, 20.0)
    assert sorted(["a", "b", "c", "never"], key=budget.wanted_first(known)) == ["never", "c", "b", "a"]


def test_what_does_not_fit_is_left_out_with_its_time():
    known = budget.Known(took_s={name: [took_s] for name, took_s in SECONDS.items()})
    kept, left = budget.within(list(SECONDS), known, budget_s=120, jobs=1, runs=1)
    assert kept == ["short", "middle"] and list(left) == ["long"] and "300 s" in left["long"]
    assert budget.within(list(SECONDS), known, budget_s=600, jobs=2, runs=1)[0] == list(SECONDS)
    with pytest.raises(UsageError, match="the shortest takes about 10 s"):
        budget.within(list(SECONDS), known, budget_s=3, jobs=8, runs=1)
