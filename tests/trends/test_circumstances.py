"""Nights of a matrix: what another world size or launcher measures is no news about the usual one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dtprobe.trends import regressions

sys.path.insert(0, str(Path(__file__).parent))
from simulated import DAY_NS, START_NS, InMemory

sys.path.pop(0)


def night(number, runs=1, good=True, value=1.0, **circumstances):
    common = {"scenario": "rank-killed", "variant": "", "torch": "2.13.0", "python": "3.11.7", "host": "h", "metric": "threads"}
    common |= {"arm": "fault", "value": value, "unit": "threads", "n": 3, "mitigation": "held", "as_expected": good}
    common |= {"verdict": "reproduced" if good else "refuted", "night": f"night-{number}", "world_size": 3, "launch": "local"}
    start = START_NS + number * DAY_NS
    return [{**common, **circumstances, "run": f"{number}-{one}", "started_ns": start + one} for one in range(runs)]


BEFORE = [row for number in range(12) for row in night(number)]


def test_a_broken_night_is_news():
    found = regressions(InMemory([*BEFORE, *night(20, runs=8, good=False, value=9.0)]))
    assert {one.kind for one in found} == {"verdict", "metric"}


@pytest.mark.parametrize("circumstances", [{"launch": "torchrun"}, {"world_size": 8}])
def test_the_same_under_other_circumstances_is_none(circumstances):
    odd = night(20, runs=8, good=False, value=9.0, **circumstances)
    assert regressions(InMemory([*BEFORE, *odd])) == ()
    assert regressions(InMemory([*BEFORE, *odd, *night(21)])) == (), "and the next usual night is compared with usual ones"
