"""Halving: the first version that differs, in few steps, and the truth where versions between cannot be run."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtprobe.errors import UsageError
from dtprobe.matrix.bisect import halve

OLD, NEW = ("reproduced", "held"), ("refuted", "none")


@given(st.integers(2, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))))
def test_the_first_changed_version_is_named_in_as_many_steps_as_halving_needs(sizes):
    n, first = sizes
    versions = [str(number) for number in range(n)]
    low, high, answers = halve(versions, lambda version: OLD if int(version) < first else NEW)
    assert (low, high) == (first - 1, first)
    assert len(answers) <= 2 + ceil(log2(n))


@given(st.integers(3, 24).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1), st.sets(st.integers(1, n - 2)))))
def test_versions_that_cannot_be_run_widen_the_answer_and_never_falsify_it(case):
    n, first, broken = case
    versions = [str(number) for number in range(n)]
    low, high, _ = halve(versions, lambda version: None if int(version) in broken else (OLD if int(version) < first else NEW))
    assert low < first <= high
    assert set(range(low + 1, high)) <= broken, "between the two lie only versions that cannot be run"


@pytest.mark.parametrize(
    ("answers", "said"),
    [((OLD, OLD), "say the same: reproduced, cure held"), ((None, NEW), "0 cannot be run"), ((OLD, None), "1 cannot")],
)
def test_ends_that_do_not_differ_or_cannot_be_run_are_refused(answers, said):
    with pytest.raises(UsageError, match=said):
        halve(["0", "1"], lambda version: answers[int(version)])
