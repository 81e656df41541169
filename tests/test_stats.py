"""Intervals cover what they should, and noise is not called a difference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtprobe import stats


@given(st.integers(1, 200), st.data())
def test_wilson_interval_holds_the_proportion_and_stays_in_the_unit_interval(n, data):
    k = data.draw(st.integers(0, n))
    found = stats.wilson(k, n)
    assert -1e-9 <= found.low <= k / n + 1e-9
    assert k / n - 1e-9 <= found.high <= 1 + 1e-9
    assert found.n == n


def test_wilson_matches_the_published_example_of_zero_in_ten():
    # Wilson's upper limit for 0 of n is z^2 / (n + z^2)
    z2 = 1.959963984540054**2
    assert stats.wilson(0, 10).high == pytest.approx(z2 / (10 + z2))


@pytest.mark.parametrize(("k", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_a_count_that_is_no_proportion_is_refused(k, n):
    with pytest.raises(ValueError, match=f"k={k} of n={n}"):
        stats.wilson(k, n)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_measured_median_lies_in_its_interval(samples):
    found = stats.measured(samples)
    assert found.low <= found.value <= found.high


def test_few_samples_give_their_range_and_say_so():
    assert stats.measured([3.0, 1.0, 2.0]) == stats.Estimate(value=2.0, low=1.0, high=3.0, n=3, method="range")


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_samples_that_cannot_be_summarised_are_refused(samples):
    with pytest.raises(ValueError, match="not finite"):
        stats.measured(samples)


def test_equal_distributions_are_called_different_about_as_rarely_as_promised():
    rng = np.random.default_rng(1)
    alarms = sum(stats.separated(rng.normal(size=12), rng.normal(size=12)) for _ in range(400))
    assert alarms / 400 < 0.03


def test_a_clear_difference_is_seen_with_three_samples_a_side():
    assert stats.separated([1.0, 1.1, 0.9], [5.0, 5.1, 4.9])


def test_overlap_or_wide_scatter_of_three_samples_is_no_difference():
    assert not stats.separated([1.0, 2.0, 3.0], [2.5, 3.5, 4.5])
    assert not stats.separated([1.0, 2.0, 3.0], [3.1, 4.0, 5.0])


def test_counts_differ_only_beyond_chance():
    assert stats.separated_counts(0, 10, 8, 10)
    assert not stats.separated_counts(2, 10, 4, 10)


def test_a_ratio_is_taken_within_pairs():
    drifting = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    found = stats.ratio([x * 1.02 for x in drifting], drifting)
    assert (found.low, found.value, found.high) == pytest.approx((1.02, 1.02, 1.02))


def test_a_ratio_of_unpaired_samples_has_an_interval_around_it():
    found = stats.ratio([2.0, 2.1, 1.9], [1.0, 1.1, 0.9, 1.0])
    assert found.low <= found.value <= found.high
    assert found.value == pytest.approx(2.0)
