"""A step of a bisection."""

from __future__ import annotations

import pytest

from dtprobe.trends.step import BAD, GOOD, UNKNOWN, judged

VERDICT = {
    "verdict": "partly",
    "expected": "partly",
    "as_expected": True,
    "because": "b",
    "metrics": {"threads": {"fault": 4.0, "control": None}},
}


@pytest.mark.parametrize(
    ("changes", "metric", "arm", "bounds", "code"),
    [
        ({}, None, "fault", {}, GOOD),
        ({"as_expected": False}, None, "fault", {}, BAD),
        ({"verdict": "inconclusive", "as_expected": False}, None, "fault", {}, UNKNOWN),
        ({"verdict": "unsupported", "as_expected": False}, "threads", "fault", {"above": 3}, UNKNOWN),
        ({}, "threads", "fault", {"above": 3.5}, BAD),
        ({}, "threads", "fault", {"above": 4.5}, GOOD),
        ({}, "threads", "fault", {"below": 4.5}, BAD),
        ({}, "threads", "control", {"above": 1}, UNKNOWN),
        ({}, "ranks", "fault", {"above": 1}, UNKNOWN),
    ],
)
def test_a_commit_is_good_bad_or_cannot_be_judged(changes, metric, arm, bounds, code):
    assert judged({**VERDICT, **changes}, metric, arm, **bounds)[0] == code
