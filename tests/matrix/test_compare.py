"""Changes between versions: found, dated, named with what was not run between, and nothing where there is only noise."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dtprobe.matrix import releases
from dtprobe.matrix.compare import Observed, changes


def seen(torch="2.13.0", python="3.11.7", ranks=2, launcher="local", cure="held", **verdict):
    verdict = {name.replace("_", "-"): n for name, n in verdict.items()} or {"reproduced": 1}
    total = sum(verdict.values())
    return Observed(
        scenario="leak",
        torch=torch,
        python=python,
        world_size=ranks,
        launcher=launcher,
        night="n",
        last_ns=1,
        verdict=verdict,
        cure=cure if isinstance(cure, dict) else {cure: total},
    )


def words(*rows):
    return [one.words for one in changes(rows)]


def test_a_failure_that_goes_away_is_fixed_in_the_release_and_dated():
    (found,) = changes([seen("2.12.0"), seen("2.12.1", not_reproduced=1), seen("2.13.0", not_reproduced=1)])
    assert found.words == "fixed in torch 2.12.1 (released 2026-06-17)"
    assert (found.low, found.high, found.between, found.released) == ("2.12.0", "2.12.1", (), "2026-06-17")
    assert found.because == "reproduced in 1 of 1 with torch 2.12.0, not-reproduced in 1 of 1 with torch 2.12.1"


def test_versions_between_that_were_not_run_are_named_and_the_first_of_them_gives_the_earliest_day():
    (found,) = changes([seen("2.10.0", refuted=1), seen("2.13.0", partly=1)])
    assert found.words == (
        "appears between torch 2.10.0 and 2.13.0 (2.11.0, 2.12.0, 2.12.1 not run, released 2026-03-23 to 2026-07-08)"
    )
    assert (found.since, found.released) == ("2026-03-23", "2026-07-08")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [seen(python="3.11.7", refuted=1), seen(python="3.12.1"), seen(python="3.13.0", refuted=1)],
            "appears only with Python 3.12.1",
        ),
        ([seen(python="3.11.7", refuted=1), seen(python="3.12.1")], "appears with Python 3.12.1, not with Python 3.11.7"),
        (
            [seen(python="3.11.7", refuted=1), seen(python="3.13.0")],
            "appears with Python 3.13.0, not with Python 3.11.7 (3.12 not run)",
        ),
        ([seen(ranks=2, refuted=1), seen(ranks=4), seen(ranks=8)], "appears from 4 ranks on (not with 2)"),
        (
            [seen(launcher="local"), seen(launcher="torchrun", refuted=1)],
            "fixed with launcher torchrun, not with launcher local",
        ),
        ([seen("2.12.0", cure="failed"), seen("2.12.1")], "the cure holds in torch 2.12.1 (released 2026-06-17)"),
        ([seen("2.12.0", partly=1), seen("2.12.1")], "reproduced instead of partly in torch 2.12.1 (released 2026-06-17)"),
        ([seen("2.15.0"), seen("2.99.0", refuted=1)], "fixed in torch 2.99.0 (day of release unknown)"),
    ],
)
def test_each_axis_has_words_of_its_own(rows, said):
    assert words(*rows) == [said]


def test_the_same_change_in_several_circumstances_is_told_once_and_one_circumstance_is_named():
    both = [seen(torch, python, **verdict) for python in ("3.11.7", "3.12.1") for torch, verdict in SPLIT]
    assert words(*both) == ["fixed in torch 2.12.1 (released 2026-06-17)"]
    one = [seen("2.12.0", "3.11.7"), seen("2.12.1", "3.11.7", refuted=1), seen("2.12.0", "3.12.1"), seen("2.12.1", "3.12.1")]
    assert words(*one)[1] == "fixed in torch 2.12.1 (released 2026-06-17); only Python 3.11.7, 2 ranks, local"


SPLIT = (("2.12.0", {}), ("2.12.1", {"not_reproduced": 1}))


def test_what_came_both_ways_changes_only_where_that_is_more_than_chance():
    assert not changes([seen("2.12.0", reproduced=3, refuted=1), seen("2.12.1", reproduced=1, refuted=3)])
    assert not changes([seen("2.12.0", reproduced=4), seen("2.12.1", reproduced=2, refuted=3)])
    (found,) = changes([seen("2.12.0", reproduced=11, refuted=1), seen("2.12.1", reproduced=1, refuted=11)])
    assert "reproduced in 11 of 12 and refuted in 1 of 12" in found.because


def test_equal_answers_and_a_missing_torch_are_no_change():
    assert not changes([seen("2.12.0"), seen("2.13.0"), seen("2.13.0", python="3.12.1")])
    assert not changes([seen("none", refuted=1), seen("2.13.0")]), "no torch is no version before the first"
    assert not changes([seen("2.12.0", cure="none"), seen("2.12.1", cure="held")]), "an arm that was not run holds nothing"


def test_releases_come_in_the_order_of_their_days():
    known = releases.table()["torch"]
    minors = {version: day for version, day in known.items() if version.endswith(".0")}
    for table in (minors, releases.table()["python"]):
        assert all(table[one] < table[two] for one, two in pairwise(sorted(table, key=releases.order)))
    assert releases.between("torch", "2.13.0+cpu", "2.9.1") == (), "in one direction only"
    assert releases.between("torch", "2.9.1", "2.12.1") == ("2.10.0", "2.11.0", "2.12.0")
