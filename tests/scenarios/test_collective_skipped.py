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


SECOND = 10**9


def dump(rank, times, *, group="default_pg", number=0):
    """A rank's flight recorder: its first collective was created at the first of the times (seconds), and so on."""
    count = len(times)
    return COLLECTIVES.frame(
        {
            "t_ns": [round(time * SECOND) for time in times],
            "rank": [rank] * count,
            "source": [f"rank{rank}/fr-{number}.json"] * count,
            "kind": ["collective"] * count,
            "group_desc": [group] * count,
            "op": ["all_reduce"] * count,
            "seq": list(range(1, count + 1)),
            "retired": [True] * count,
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


def test_the_rank_that_has_not_entered_what_others_wait_in_is_named(judging):
    frames = pd.concat([dump(0, [1, 2, 3]), dump(1, [1, 2]), dump(2, [1, 2, 3])])

    assert judging.named_by_recorder(frames, [4 * SECOND]) == (1,)


def test_nobody_is_named_while_all_wait_in_the_same_collective(judging):
    frames = pd.concat([dump(rank, [1, 2, 3]) for rank in range(3)])

    assert judging.named_by_recorder(frames, [4 * SECOND]) == ()


def test_nobody_is_named_without_a_suspicion(judging):
    frames = pd.concat([dump(0, [1, 2, 3]), dump(1, [1, 2])])

    assert judging.named_by_recorder(frames, []) == ()


def test_a_missing_rank_that_came_back_after_the_timeout_is_still_named(judging):
    frames = pd.concat([dump(0, [1, 2, 3]), dump(1, [1, 2, 9], number=1)])

    assert judging.named_by_recorder(frames, [4 * SECOND]) == (1,)


def test_a_false_alarm_before_the_hang_accuses_nobody_in_its_place(judging):
    frames = pd.concat([dump(0, [1, 2, 3]), dump(1, [1, 2]), dump(2, [1, 2.5, 3])])

    assert judging.named_by_recorder(frames, [round(2.2 * SECOND), 4 * SECOND]) == (1,)


def test_other_groups_accuse_nobody(judging):
    frames = pd.concat([dump(0, [1, 2], group="tensor"), dump(1, [1], group="tensor")])

    assert judging.named_by_recorder(frames, [4 * SECOND]) == ()


def test_the_rank_whose_stack_is_in_no_collective_is_named(judging):
    frames = pd.concat([stack(0, WAITING), stack(1, AWAY), stack(2, WAITING)])

    assert judging.named_by_stacks(frames) == (1,)


def test_stacks_of_a_false_alarm_before_the_hang_accuse_nobody_in_its_place(judging):
    early = [stack(0, AWAY), stack(1, WAITING), stack(2, WAITING)]
    late = [stack(0, WAITING, 1), stack(1, AWAY, 1), stack(2, WAITING, 1)]

    assert judging.named_by_stacks(pd.concat([*early, *late])) == (1,)


@pytest.mark.parametrize("frames", [WAITING, AWAY])
def test_stacks_that_are_alike_name_nobody(judging, frames):
    assert judging.named_by_stacks(pd.concat([stack(rank, frames) for rank in range(3)])) == ()


def test_no_frames_name_nobody(judging):
    assert judging.named_by_recorder(COLLECTIVES.empty(), [SECOND]) == ()
    assert judging.named_by_stacks(STACKS.empty()) == ()
