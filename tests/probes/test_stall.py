"""Synthetic records in torch's form: what the real ones of gloo cannot show (their groups name no members)."""

from __future__ import annotations

import json

from dtprobe.probes.stall import find, open_ages, parse

S = 1_000_000_000


def entry(seq, *, retired=True, name="nccl:all_reduce", group="1", sizes=((4,),), created_ns=0, **more):
    whole = {
        "collective_seq_id": seq,
        "input_sizes": sizes,
        "is_p2p": False,
        "process_group": [group, "tp"],
        "profiling_name": name,
        "retired": retired,
        "state": "scheduled",
        "time_created_ns": created_ns,
        "time_discovered_completed_ns": 0,
        "timeout_ms": 600_000,
    }
    return {**whole, **more}


def records(*entries, members=None):
    config = {"1": {"desc": "tp", "ranks": json.dumps(members or [])}}
    return parse(json.dumps({"entries": entries, "pg_config": config}, separators=(",", ":")).encode())


def test_a_member_that_recorded_nothing_in_the_group_is_behind_where_the_backend_tells_the_members():
    seen = {
        0: records(entry(1, retired=False), members=[0, 2]),
        1: records(),
        2: records(entry(9, group="other")),
    }
    (stall,) = find(seen, 10 * S, 3, world_size=3)
    assert (stall.waiting, stall.behind, stall.others) == ((0,), (2,), {})


def test_two_groups_in_opposite_order_are_two_stalls_with_each_rank_behind_in_one():
    seen = {
        0: records(entry(1, group="a"), entry(2, group="a", retired=False), entry(1, group="b")),
        1: records(entry(1, group="a"), entry(1, group="b"), entry(2, group="b", retired=False)),
    }
    stalls = {stall.operation.group: stall for stall in find(seen, 10 * S, 3, world_size=2)}
    assert stalls["a"].behind == (1,) and stalls["b"].behind == (0,)


def test_another_size_at_the_same_place_is_shown():
    seen = {0: records(entry(1, retired=False)), 1: records(entry(1, retired=False, sizes=((6,),)))}
    (stall,) = find(seen, 10 * S, 3, world_size=2)
    assert not stall.behind and [str(one) for one in stall.others.values()] == ["nccl:all_reduce [[6]] (seq 1 of tp)"]


def test_what_is_young_retired_completed_or_point_to_point_is_no_stall():
    seen = {
        0: records(
            entry(1),
            entry(2, retired=False, state="completed"),
            entry(3, retired=False, is_p2p=True),
            entry(4, retired=False, created_ns=8 * S),
        )
    }
    assert find(seen, 10 * S, 3, world_size=1) == []


def test_half_of_a_short_timeout_is_enough():
    seen = {0: records(entry(1, retired=False, created_ns=8 * S, timeout_ms=3000))}
    assert len(find(seen, 10 * S, 60, world_size=1)) == 1


def test_ages_of_open_operations_are_read_without_parsing_the_rest():
    text = json.dumps({"entries": [entry(1), entry(2, retired=False, created_ns=6 * S)]}, separators=(",", ":")).encode()
    assert open_ages(text, 10 * S) == [(4.0, 600.0)]


def test_what_an_old_record_shows_open_is_no_stall_but_tells_how_far_its_rank_had_come():
    seen = {0: records(entry(1), entry(2, retired=False)), 1: records(entry(1, retired=False))}
    assert find(seen, 10 * S, 3, world_size=2, fresh=()) == []
    (stall,) = find(seen, 10 * S, 3, world_size=2, fresh=(0,))
    assert (stall.operation.seq, stall.waiting) == (2, (0,))
