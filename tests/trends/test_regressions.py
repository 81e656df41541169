"""What has become worse is found in the first night that has it, and nothing else is."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from simulated import Nights, unchanged

sys.path.pop(0)

BEFORE = 12
LEAK = ("gloo-thread-leak", "threads_per_group_handle", "fault")


@pytest.fixture(scope="module")
def nights() -> Nights:
    made = Nights(seed=3)
    made.passed(BEFORE)
    return made


def test_a_night_like_those_before_raises_nothing(nights):
    assert after(nights, unchanged) == ()


def after(nights: Nights, change, **common):
    return copy.deepcopy(nights).night(change, git="b" * 40, **common)


def grown(rows):
    return [{**row, "value": row["value"] + 1} if (row["scenario"], row["metric"], row["arm"]) == LEAK else row for row in rows]


def test_a_leak_that_grows_by_one_thread_a_cycle_is_found_dated_and_attributed(nights):
    (found,) = after(nights, grown, kernel="6.2")
    assert (found.kind, found.scenario, found.metric, found.arm) == ("metric", *LEAK)
    assert found.after == found.before + 1
    assert found.first_bad_run.startswith(f"{BEFORE + 1:04d}-") and found.last_good_run.startswith(f"{BEFORE:04d}-")
    assert found.commit_range == f"{'a' * 40}..{'b' * 40}" and found.changed == {"kernel": ("6.1", "6.2")}
    assert found.bisect.startswith(
        f"dtprobe history bisect gloo-thread-leak --good {'a' * 40} --bad {'b' * 40} --metric threads_per_group_handle"
    )
    assert f"--above {found.before + 0.5:g}" in found.bisect and found.confidence > 0.99


def test_an_expectation_that_no_longer_holds_is_found(nights):
    def broken(rows):
        return [
            {**row, "verdict": "not-reproduced", "as_expected": False} if row["scenario"] == "rank-killed" else row
            for row in rows
        ]

    found = after(nights, broken)
    assert [(one.kind, one.scenario, one.before, one.after) for one in found] == [
        ("verdict", "rank-killed", "reproduced", "not-reproduced")
    ]
    assert found[0].last_good_run.startswith(f"{BEFORE:04d}-") and "dtprobe history bisect rank-killed" in found[0].bisect


def dearer(factor):
    def change(rows):
        return [{**row, "value": row["value"] * factor} if str(row["metric"]).startswith("cost ") else row for row in rows]

    return change


def test_a_probe_that_costs_5_percent_more_is_found_dated_and_attributed(nights):
    found = after(nights, dearer(1.05))
    assert {one.kind for one in found} == {"cost"} and all(one.after > one.before for one in found)
    assert all(one.first_bad_run.startswith(f"{BEFORE + 1:04d}-") for one in found)
    assert {one.commit_range for one in found} == {f"{'a' * 40}..{'b' * 40}"}


def test_a_probe_that_has_become_cheaper_is_no_regression(nights):
    assert after(nights, dearer(0.9)) == ()


def test_a_scenario_that_is_gone_is_found(nights):
    found = after(nights, lambda rows: [row for row in rows if row["scenario"] != "straggler"])
    assert [(one.kind, one.scenario) for one in found] == [("gone", "straggler")]


def test_a_night_of_one_scenario_misses_none(nights):
    assert after(nights, lambda rows: [row for row in rows if row["scenario"] == "straggler"]) == ()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_thirty_unchanged_nights_raise_nothing(seed):
    made = Nights(seed=100 + seed)
    assert [found for _ in range(30) for found in made.night()] == []
