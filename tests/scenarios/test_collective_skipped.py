"""Who is missing, from the frames of one arm run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dtprobe import catalog
from dtprobe.readers.flight_recorder import SCHEMA as COLLECTIVES
from dtprobe.readers.pyspy import SCHEMA as STACKS


@pytest.fixture(scope="module")
def judging():
    folder = next(path for path in catalog.content_folders("scenarios") if path.name == "collective-skipped")
    return catalog.load_module(Path(folder) / "scenario.py", "_test_collective_skipped")


def dump(rank, last, *, open_last, number=0, group="default_pg"):
    """A rank's flight recorder after `last` collectives, the last of them still open or not."""
    return COLLECTIVES.frame(
        {
            "rank": [rank] * last,
            "source": [f"rank{rank}/fr-{number}.json"] * last,
            "kind": ["collective"] * last,
            "group_desc": [group] * last,
            "op": ["all_reduce"] * last,
            "seq": list(range(1, last + 1)),
            "retired": [*([True] * (last - 1)), not open_last],
        }
    )


def stack(rank, frames, number=0):
    return STACKS.frame(
        {
            "rank": [rank],
            "source": [f"rank{rank}/pyspy-{number}.json"],
            "kind": ["stack"],
            "thread_name": ["MainThread"],
            "frames": [frames],
        }
    )


WAITING = "all_reduce (torch/distributed/distributed_c10d.py:3252);train (worker.py:60)"
AWAY = "evaluate (worker.py:30);train (worker.py:58)"


def test_the_rank_behind_an_open_collective_is_named(judging):
    frames = pd.concat([dump(0, 4, open_last=True), dump(1, 3, open_last=False), dump(2, 4, open_last=True)])

    assert judging.named_by_recorder(frames) == (1,)


def test_nobody_is_named_while_all_wait_in_the_same_collective(judging):
    frames = pd.concat([dump(rank, 4, open_last=True) for rank in range(3)])

    assert judging.named_by_recorder(frames) == ()


def test_nobody_is_named_when_nothing_is_open(judging):
    frames = pd.concat([dump(0, 4, open_last=False), dump(1, 3, open_last=False)])

    assert judging.named_by_recorder(frames) == ()


def test_a_later_dump_in_which_the_missing_rank_came_back_does_not_acquit_it(judging):
    first = [dump(0, 4, open_last=True), dump(1, 3, open_last=False)]
    later = [dump(0, 4, open_last=False, number=1), dump(1, 4, open_last=True, number=1)]

    assert judging.named_by_recorder(pd.concat([*first, *later])) == (1,)


def test_other_groups_accuse_nobody(judging):
    frames = pd.concat([dump(0, 4, open_last=True, group="tensor"), dump(1, 3, open_last=False, group="tensor")])

    assert judging.named_by_recorder(frames) == ()


def test_the_rank_whose_stack_is_in_no_collective_is_named(judging):
    frames = pd.concat([stack(0, WAITING), stack(1, AWAY), stack(2, WAITING)])

    assert judging.named_by_stacks(frames) == (1,)


@pytest.mark.parametrize("frames", [WAITING, AWAY])
def test_stacks_that_are_alike_name_nobody(judging, frames):
    assert judging.named_by_stacks(pd.concat([stack(rank, frames) for rank in range(3)])) == ()


def test_no_frames_name_nobody(judging):
    assert judging.named_by_recorder(COLLECTIVES.empty()) == ()
    assert judging.named_by_stacks(STACKS.empty()) == ()
