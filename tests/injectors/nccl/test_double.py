"""The test double of libnccl really moves data between processes; else nothing shown with it would mean anything."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("cc")


def values(told, step):
    return [one["values"] for one in told if one["step"] == step]


@pytest.mark.parametrize("shim", [False, True], ids=["alone", "under the shim"])
def test_collectives_give_what_nccl_gives(start, shim):
    steps = [
        ["init"],
        ["all_reduce", 3],
        ["all_reduce", 1, 2],
        ["reduce_scatter"],
        ["all_gather"],
        ["all_to_all"],
        ["broadcast", 1],
        ["bcast", 2],
        ["reduce", 1],
        ["gather", 2],
        ["scatter", 0],
        ["destroy"],
    ]
    environ = {} if shim else {"LOAD": "bypass"}
    told = start(steps, world_size=3, shim=shim, environ=environ).finish()
    assert all(one["result"] == 0 for lines in told.values() for one in lines)
    for rank, lines in told.items():
        assert values(lines, "all_reduce") == [[6.0] * 3, [3.0]]
        assert values(lines, "reduce_scatter") == [[3 * rank]]
        assert values(lines, "all_gather") == [[10, 11, 12]]
        assert values(lines, "all_to_all") == [[rank, 10 + rank, 20 + rank]]
        assert values(lines, "broadcast") == [[11, 21]]
        assert values(lines, "bcast") == [[12]]
        assert values(lines, "reduce") == [[6] if rank == 1 else [0]]
        assert values(lines, "gather") == [[10, 11, 12] if rank == 2 else [0, 0, 0]]
        assert values(lines, "scatter") == [[rank]]


def test_both_sides_may_send_and_receive_in_one_group(start):
    steps = {
        rank: [["init"], ["group_start"], ["send", 1 - rank, 70 + rank], ["recv", 1 - rank], ["group_end"]] for rank in (0, 1)
    }
    told = start(steps).finish()
    assert values(told[0], "group_end") == [[71]]
    assert values(told[1], "group_end") == [[70]]


def test_split_and_shrink_make_communicators_of_the_right_ranks(start):
    steps = {
        rank: [
            ["init"],
            ["split", rank % 2, -rank],
            ["all_reduce", 1, 0, 1],
            ["shrink", 1],
            *([["all_reduce", 1, 0, 2]] * (rank != 1)),
        ]
        for rank in range(3)
    }
    told = start(steps, world_size=3).finish()
    assert values(told[0], "all_reduce") == [[4.0], [4.0]]
    assert values(told[1], "all_reduce") == [[2.0]]
    assert values(told[2], "all_reduce") == [[4.0], [4.0]]


def test_abort_releases_who_waits_for_a_rank_that_does_not_come(start):
    # rank 1 stays until the abort is over: its end would be an error of its own
    steps = {0: [["init"], ["abort_soon", "go"], ["all_reduce"], ["touch", "over"]], 1: [["init"], ["wait", "over"]]}
    job = start(steps)
    job.eventually(job.hangs(0), "rank 0 waits in its collective")
    (job.shared / "go").touch()
    told = job.finish()
    assert told[0][-2] == {"step": "all_reduce", "result": 3, "values": [1.0] * 4}


def test_a_dead_peer_is_an_asynchronous_error(start):
    told = start({0: [["init"], ["all_reduce"], ["async_error"]], 1: [["init"]]}).finish()
    assert told[0][1]["result"] == 6
    assert told[0][2]["values"] == [6.0]
