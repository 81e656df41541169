"""Which ranks are apart after which step, and how late an error is, from the observations of one run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dtprobe import catalog


@pytest.fixture(scope="module")
def judging():
    folder = next(path for path in catalog.content_folders("scenarios") if path.name == "silent-divergence")
    return catalog.load_module(Path(folder) / "scenario.py", "_test_silent_divergence")


def said(digests, *, arm="fault", step=0, loss=("1.0000",) * 3, repeat=0):
    """One step as all ranks recorded it."""
    return pd.DataFrame(
        {
            "arm": arm,
            "repeat": repeat,
            "rank": list(range(len(digests))),
            "step": step,
            "loss": list(loss[: len(digests)]),
            "norm": "2.0000",
            "digest": list(digests),
        }
    )


def test_ranks_whose_hashes_agree_are_not_apart(judging):
    [row] = judging.compared(said("aaa")).to_dict("records")
    assert (row["parted"], row["logged"], row["odd"]) == (False, False, ())


def test_the_rank_apart_is_the_one_outside_the_majority(judging):
    [row] = judging.compared(said("aba")).to_dict("records")
    assert (row["parted"], row["logged"], row["odd"]) == (True, False, (1,))


def test_without_a_majority_all_are_apart(judging):
    [row] = judging.compared(said("abc")).to_dict("records")
    assert row["odd"] == (0, 1, 2)


def test_a_loss_that_differs_is_what_a_log_shows(judging):
    [row] = judging.compared(said("aba", loss=("1.0000", "1.0001", "1.0000"))).to_dict("records")
    assert row["logged"]


def test_a_step_that_a_rank_did_not_reach_is_not_compared(judging):
    assert judging.compared(said("ab")).empty
    assert judging.compared(said("aba", arm="bare")).empty
    assert judging.compared(pd.DataFrame()).empty


def test_an_error_is_as_late_as_the_steps_since_they_parted(judging):
    steps = pd.concat(
        [said("aaa", step=0, arm="mitigated"), said("aba", step=1, arm="mitigated"), said("aba", step=2, arm="mitigated")]
    )
    errors = pd.DataFrame({"arm": "mitigated", "repeat": 0, "rank": [0, 1], "step": [1, 3], "named": "1"})
    assert judging.latency(judging.compared(steps), errors) == [0, 2]


def test_an_error_of_ranks_that_never_parted_is_not_counted_as_found(judging):
    steps = said("aaa", arm="mitigated")
    errors = pd.DataFrame({"arm": "mitigated", "repeat": 0, "rank": [0], "step": [0], "named": "1"})
    assert judging.latency(judging.compared(steps), errors) == []
