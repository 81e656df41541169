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


VERSIONS = [{"torch": "2.12.0"}, {"python": "3.12.1"}]


@pytest.mark.parametrize("other", VERSIONS)
def test_versions_that_are_run_in_turn_are_compared_each_with_itself(other):
    def usual(number):
        return night(2 * number)

    def beside(number):
        return night(2 * number + 1, good=False, value=9.0, **other)

    every = [row for number in range(12) for made in (usual, beside) for row in made(number)]
    assert regressions(InMemory([*every, *usual(12)])) == ()
    assert regressions(InMemory([*every, *usual(12), *beside(12)])) == ()
    worse = night(25, runs=8, good=False, value=99.0, **other)
    (found,) = regressions(InMemory([*every, *usual(12), *worse]))
    assert found.kind == "metric" and found.last_good_run == "23-0", "its own last run, not that of the other version"


@pytest.mark.parametrize("other", VERSIONS)
def test_an_upgrade_that_makes_it_worse_is_found_and_named(other):
    found = regressions(InMemory([*BEFORE, *night(20, runs=8, good=False, value=9.0, **other)]))
    assert {one.kind for one in found} == {"verdict", "metric"}
    assert all(set(one.changed) == set(other) for one in found)
