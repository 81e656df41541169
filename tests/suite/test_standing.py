"""Flaky or broken, by intervals."""

from __future__ import annotations

import pytest

from dtprobe.suite.standing import Earlier, standing


@pytest.mark.parametrize(
    ("k", "n", "earlier", "status", "new"),
    [
        (4, 4, Earlier(), "as-expected", False),
        (1, 1, Earlier(k=3, n=10), "as-expected", False),
        (0, 4, Earlier(), "broken", True),
        (0, 4, Earlier(k=0, n=12), "broken", False),
        (0, 2, Earlier(), "not-as-expected", True),
        (0, 2, Earlier(k=40, n=40), "broken", True),
        (3, 4, Earlier(), "flaky", True),
        (3, 4, Earlier(k=40, n=40), "flaky", True),
        (3, 4, Earlier(k=31, n=40), "flaky", False),
        (1, 4, Earlier(k=39, n=40), "flaky", True),
    ],
)
def test_several_runs_are_judged_by_their_interval_and_by_what_was_before(k, n, earlier, status, new):
    found = standing(k, n, earlier)
    assert (found.status, found.new) == (status, new), found
    assert f"{k} of {n} runs" in found.because and (not earlier.n or f"{earlier.k} of {earlier.n}" in found.because)
