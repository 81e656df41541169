"""Levels of a series."""

from __future__ import annotations

import random

import pytest

from dtprobe.trends.series import change_points, noise


def steps(seed, levels, each=12, sd=1.0):
    rng = random.Random(seed)
    return [rng.gauss(level, sd) for level in levels for _ in range(each)]


@pytest.mark.parametrize("seed", range(20))
def test_a_new_level_is_found_where_it_begins(seed):
    (found,) = change_points(steps(seed, (0, 6)))
    assert abs(found - 12) <= 1


def test_noise_and_single_odd_nights_are_no_levels():
    flat = sum(bool(change_points(steps(seed, (0, 0, 0)))) for seed in range(40))
    assert flat <= 2
    one = steps(1, (0, 0))
    one[10] += 40
    assert change_points(one) == []


@pytest.mark.parametrize("sd", [0.0, 1.0])
@pytest.mark.parametrize("since", range(1, 7))
def test_a_level_is_one_when_four_nights_have_it_and_begins_where_it_began(since, sd):
    found = change_points([*steps(5, (0,), each=20, sd=sd), *steps(6, (50,), each=since, sd=sd)])
    assert found == ([20] if since >= 4 else [])


def test_few_nights_and_equal_ones_have_none():
    assert change_points([1.0] * 30) == [] and change_points([1, 2, 9]) == [] and change_points([]) == []


def test_the_noise_of_a_series_with_a_step_is_that_between_the_steps():
    assert noise(steps(2, (0, 1000), each=200)) == pytest.approx(1.0, rel=0.2)
    assert noise([]) == 0.0
