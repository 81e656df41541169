from __future__ import annotations

import pytest

from dtprobe.probes import stall
from dtprobe.probes.liveness import Finding, Life
from dtprobe.probes.stall import Operation, Records
from dtprobe.probes.waits import Hang, Kind, Wait, judge

NOW_NS = 1_000_000_000_000
BLOCKED = Finding(life=Life.BLOCKED, text="blocked in futex", quiet_s=60)
WORKS = Finding(life=Life.WORKS, text="computes")
STOPPED = Finding(life=Life.STOPPED, text="stopped (state T)")
ENDED = Finding(life=Life.ENDED, text="has ended")


def call(name, seq, group="0", *, ago_s=20.0, is_open=False, sizes="[[4]]", timeout_s=1800, backend="gloo"):
    """A call `ago_s` ago; group 0 is the default one."""
    described = "default_pg" if group == "0" else "undefined"
    return Operation(
        name=f"{backend}:{name}",
        group=group,
        group_desc=described,
        seq=seq,
        sizes=sizes,
        created_ns=NOW_NS - int(ago_s * 1e9),
        timeout_ms=int(timeout_s * 1e3),
        open=is_open,
    )


def done(count, group="0"):
    """So many completed all-reduces, a second apart, a while ago."""
    return [call("all_reduce", seq, group, ago_s=100 - seq) for seq in range(1, count + 1)]


def judged(calls, findings, *, fresh=None, gil=None, world=None, members=None, inside=None, suspect_s=15):
    """The answer for the first stall that is found."""
    records = {rank: Records(operations=tuple(some), members=members or {}) for rank, some in calls.items()}
    fresh = list(calls) if fresh is None else fresh
    world = world or len(findings)
    first = min(stall.find(records, NOW_NS, suspect_s, world, fresh), key=lambda one: one.operation.created_ns)
    limits = {"quiet_s": 11, "patience_s": 60, "now_ns": NOW_NS}
    return judge(first, records, findings, gil or {}, fresh=fresh, world_size=world, inside=inside, **limits)


def waiting(seq, name="all_reduce", group="0", **more):
    return call(name, seq, group, is_open=True, **more)


@pytest.mark.parametrize(
    ("finding", "kind"), [(BLOCKED, Kind.BLOCKED), (STOPPED, Kind.STOPPED), (ENDED, Kind.ENDED), (WORKS, None)]
)
def test_a_rank_that_did_not_enter_is_the_cause_unless_it_works(finding, kind):
    answer = judged({0: [*done(3), waiting(4)], 1: done(3)}, {0: BLOCKED, 1: finding})
    if kind is None:
        assert isinstance(answer, Wait) and answer.settled and "rank 1: computes" in answer.because
    else:
        assert isinstance(answer, Hang) and answer.kind is kind and answer.suspects == (1,)


def test_a_rank_that_became_quiet_just_now_is_given_time():
    quiet = Finding(life=Life.BLOCKED, text="blocked in read", quiet_s=3)
    answer = judged({0: [*done(3), waiting(4)], 1: done(3)}, {0: BLOCKED, 1: quiet})
    assert isinstance(answer, Wait) and not answer.settled


def test_a_chain_of_waits_is_followed_to_the_rank_that_waits_for_nobody():
    members = {"1": frozenset({0, 1}), "2": frozenset({1, 2})}
    calls = {0: [waiting(1, group="1")], 1: [waiting(1, group="2")], 2: []}
    answer = judged(calls, {0: BLOCKED, 1: BLOCKED, 2: STOPPED}, fresh=[0, 1], members=members)
    assert isinstance(answer, Hang) and answer.suspects == (2,) and answer.kind is Kind.STOPPED
    healthy = judged(calls, {0: BLOCKED, 1: BLOCKED, 2: WORKS}, members=members)
    assert isinstance(healthy, Wait) and healthy.because.startswith("rank 2: computes")


def test_a_rank_that_is_known_to_be_dead_counts_though_another_still_works():
    answer = judged({0: [*done(3), waiting(4)], 1: done(3), 2: done(3)}, {0: BLOCKED, 1: WORKS, 2: STOPPED}, fresh=[0, 1])
    assert isinstance(answer, Hang) and answer.suspects == (2,)


def test_a_stuck_rank_is_not_called_the_cause_while_another_works():
    answer = judged({0: [*done(3), waiting(4)], 1: done(3), 2: done(3)}, {0: BLOCKED, 1: WORKS, 2: BLOCKED})
    assert isinstance(answer, Wait)


def test_a_stopped_rank_counts_though_it_entered_and_though_its_records_are_old_or_missing():
    for records in ([*done(3), waiting(4)], done(3), []):
        answer = judged({0: [*done(3), waiting(4)], 1: records}, {0: BLOCKED, 1: STOPPED}, fresh=[0])
        assert isinstance(answer, Hang) and answer.suspects == (1,)


def test_where_all_entered_and_nothing_moves_all_are_suspects_and_where_something_moves_nobody():
    calls = {rank: [*done(3), waiting(4)] for rank in (0, 1)}
    answer = judged(calls, {0: BLOCKED, 1: BLOCKED})
    assert isinstance(answer, Hang) and answer.suspects is None and answer.kind is Kind.SYMMETRIC
    moves = Finding(life=Life.WORKS, text="reads or writes (900 KiB/s)")
    assert isinstance(judged(calls, {0: moves, 1: BLOCKED}), Wait)


def test_crossed_groups_of_many_ranks_name_the_one_that_differs():
    members = {group: frozenset(range(4)) for group in ("1", "2")}
    calls = {rank: [waiting(1, group="2" if rank == 2 else "1")] for rank in range(4)}
    answer = judged(calls, dict.fromkeys(range(4), BLOCKED), members=members)
    assert isinstance(answer, Hang) and answer.suspects == (2,) and answer.kind is Kind.MUTUAL


def test_of_two_ranks_the_one_whose_call_breaks_the_order_of_its_earlier_calls_is_named():
    def steps(last):
        calls = [call("all_reduce", seq, group, ago_s=100 - 2 * seq - (group == "2")) for seq in (1, 2) for group in ("1", "2")]
        return [*calls, waiting(3, group=last)]

    answer = judged({0: steps("1"), 1: steps("2")}, {0: BLOCKED, 1: BLOCKED})
    assert isinstance(answer, Hang) and answer.suspects == (1,)


def test_of_two_ranks_without_history_neither_is_blamed():
    calls = {0: [waiting(1, group="1")], 1: [waiting(1, group="2")]}
    answer = judged(calls, {0: BLOCKED, 1: BLOCKED})
    assert isinstance(answer, Hang) and answer.suspects is None and answer.kind is Kind.MUTUAL


def test_another_call_at_the_same_place_is_a_mismatch_even_after_it_has_passed_on_one_side():
    passed = [*done(3), call("broadcast", 4, ago_s=21), waiting(5)]
    answer = judged({0: [*done(3), waiting(4, ago_s=22)], 1: passed}, {0: BLOCKED, 1: BLOCKED})
    assert isinstance(answer, Hang) and answer.kind is Kind.MISMATCH and answer.suspects == (1,)


def test_other_sizes_are_a_mismatch_only_where_all_ranks_must_hand_over_the_same():
    def two(name):
        return {0: [*done(3), waiting(4, name)], 1: [*done(3), waiting(4, name, sizes="[[6]]")]}

    assert judged(two("all_reduce"), {0: BLOCKED, 1: BLOCKED}).kind is Kind.MISMATCH
    assert judged(two("gather"), {0: BLOCKED, 1: BLOCKED}).kind is Kind.SYMMETRIC


def test_a_rank_that_began_something_in_the_background_and_works_on_is_waited_for():
    members = {"1": frozenset({0, 1}), "2": frozenset({0, 1})}
    calls = {0: [waiting(1, group="1")], 1: [waiting(1, group="2")]}
    asleep = Finding(life=Life.SLEEPS, text="asleep", sleep_s=3)
    for alive in (WORKS, asleep):
        assert isinstance(judged(calls, {0: BLOCKED, 1: alive}, members=members), Wait)


def test_a_rank_in_an_operation_on_a_gpu_may_spin_and_is_not_at_work_for_that():
    members = {"1": frozenset({0, 1}), "2": frozenset({0, 1})}
    calls = {rank: [waiting(1, group=str(rank + 1), backend="nccl")] for rank in (0, 1)}
    assert judged(calls, {0: WORKS, 1: WORKS}, members=members).kind is Kind.MUTUAL
    calls = {rank: [*done(3), waiting(4, backend="nccl")] for rank in (0, 1)}
    assert judged(calls, {0: WORKS, 1: WORKS}).kind is Kind.SYMMETRIC
    calls[1] = done(3)
    assert isinstance(judged(calls, {0: WORKS, 1: WORKS}), Wait)


@pytest.mark.parametrize(
    ("ago_s", "timeout_s", "inside", "finding", "hang"),
    [
        (20.0, 1800, {0: 19.0}, WORKS, False),
        (90.0, 1800, {0: 89.0}, WORKS, True),
        (20.0, 1800, {0: 19.0}, BLOCKED, True),
        (5.0, 1800, {}, WORKS, False),
        (5.0, 1800, {}, BLOCKED, True),
        (5.0, 8, {}, WORKS, True),
        (20.0, 21, {0: 19.0}, WORKS, True),
    ],
)
def test_a_host_that_makes_connections_or_loads_kernels_for_a_gpu_is_at_work_until_it_is_late(
    ago_s, timeout_s, inside, finding, hang
):
    calls = {rank: [*done(3), waiting(4, backend="nccl", ago_s=ago_s, timeout_s=timeout_s)] for rank in (0, 1)}
    answer = judged(calls, {0: finding, 1: finding}, inside=inside, suspect_s=2)
    assert isinstance(answer, Hang) is hang and (not hang or answer.kind is Kind.SYMMETRIC), answer


def test_who_belongs_to_a_new_group_is_not_guessed_from_who_came_first():
    calls = {0: [*done(3), waiting(1, group="1")], 1: done(3), 2: [*done(3), waiting(1, group="1")]}
    assert isinstance(judged(calls, {0: BLOCKED, 1: WORKS, 2: BLOCKED}), Wait)


def test_a_rank_of_another_host_is_not_judged_until_the_timeout_is_near():
    calls = {0: [*done(3), waiting(4)], 1: [*done(3), waiting(4)]}
    answer = judged(calls, {0: BLOCKED, 1: BLOCKED}, world=3)
    assert isinstance(answer, Wait) and "rank 2 is not on this host" in answer.because
    calls = {rank: [*done(3), waiting(4, ago_s=28, timeout_s=30)] for rank in (0, 1)}
    answer = judged(calls, {0: BLOCKED, 1: BLOCKED}, world=3)
    assert isinstance(answer, Hang) and answer.kind is Kind.TIMEOUT and answer.suspects == (2,)


@pytest.mark.parametrize(
    ("sleep_s", "idle_s", "native", "timeout_s", "hang"),
    [
        (41, 0, False, 60, True),  # 40 s are left
        (39, 0, False, 60, False),
        (41, 0, True, 60, False),  # how much of it is over is not known
        (30, 31, False, 1800, True),  # a minute of nothing but sleep, as is known beforehand
        (30, 29, False, 1800, False),
        (0.1, 61, False, 1800, True),  # a loop of short ones
        (600, 61, True, 1800, True),
        (600, 20, True, 1800, False),
    ],
)
def test_a_sleep_is_a_hang_where_it_outlasts_the_timeout_or_the_patience(sleep_s, idle_s, native, timeout_s, hang):
    asleep = Finding(life=Life.SLEEPS, text="asleep", sleep_s=sleep_s, idle_s=idle_s, native_sleep=native)
    answer = judged({0: [*done(3), waiting(4, timeout_s=timeout_s)], 1: done(3)}, {0: BLOCKED, 1: asleep})
    assert isinstance(answer, Hang) is hang
    assert not hang or (answer.kind is Kind.ASLEEP and answer.suspects == (1,))


def test_the_interpreter_lock_held_is_the_cause_though_the_rank_seems_asleep():
    asleep = Finding(life=Life.SLEEPS, text="asleep", sleep_s=600, native_sleep=True)
    answer = judged({0: [*done(3), waiting(4)], 1: done(3)}, {0: BLOCKED, 1: asleep}, gil={1: "thread 7 has held the GIL"})
    assert isinstance(answer, Hang) and answer.kind is Kind.GIL and answer.suspects == (1,)
    assert answer.ranks[1].startswith("thread 7 has held the GIL, last called all_reduce seq 3")


def test_one_that_waits_where_the_others_have_gone_on_is_said_to_be_alone_in_it():
    calls = {0: [*done(3), waiting(4, "broadcast")], 1: [*done(3), call("broadcast", 4)]}
    answer = judged(calls, {0: BLOCKED, 1: BLOCKED})
    assert isinstance(answer, Hang) and answer.kind is Kind.SYMMETRIC and answer.suspects is None
    assert answer.because == "rank 0 is in it and nothing moves, rank 1 has left it"
