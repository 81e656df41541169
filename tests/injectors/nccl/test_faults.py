"""Each fault arrives at the rank and call it aims at, is seen there, and nowhere else."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("cc")

THREE = [["init"], ["all_reduce"], ["all_reduce"], ["all_reduce"]]


def results(told, step):
    return [one["result"] for one in told if one["step"] == step]


def values(told, step):
    return [one["values"] for one in told if one["step"] == step]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("ncclUnhandledCudaError", 1),
        ("ncclSystemError", 2),
        ("ncclInternalError", 3),
        ("ncclInvalidArgument", 4),
        ("ncclInvalidUsage", 5),
        ("ncclRemoteError", 6),
        ("ncclInProgress", 7),
        ("ncclTimeout", 8),
    ],
)
def test_any_result_can_be_planted_at_one_call_of_one_rank(start, name, number):
    alone = [["init"], ["broadcast", 1], ["broadcast", 1], ["broadcast", 1]]
    job = start(alone, f"nccl:fail,rank=1,call=ncclBroadcast,nth=3,result={name}")
    # The root of a broadcast: its third never reaches rank 0, which the end of rank 1 releases.
    told = job.finish()
    assert results(told[1], "broadcast") == [0, 0, number]
    assert results(told[0], "broadcast") == [0, 0, 6]
    assert job.fired() == [(1, "ncclBroadcast", 3)]


@pytest.mark.parametrize("form", ["plain", "config", "scalable"])
def test_every_form_of_init_fails_and_leaves_no_communicator(start, form):
    job = start({0: [["init", form]], 1: [["init", form]]}, "nccl:fail,call=init,result=ncclSystemError")
    told = job.finish()
    assert [results(told[rank], "init") for rank in (0, 1)] == [[2], [2]]
    assert job.rings()["comm_index"].isna().all()
    assert len(job.fired()) == 2


def test_a_failed_split_leaves_the_parent_usable(start):
    steps = [["init"], ["split", 0, 0], ["all_reduce"]]
    told = start(steps, "nccl:fail,call=ncclCommSplit,result=ncclInvalidUsage").finish()
    for rank in (0, 1):
        assert results(told[rank], "split") == [5]
        assert values(told[rank], "all_reduce") == [[3.0] * 4]


def test_delay_makes_the_call_late_by_at_least_the_time_asked(start):
    job = start(THREE, "nccl:delay,rank=0,call=ncclAllReduce,nth=2,seconds=0.3")
    told = job.finish()
    assert values(told[0], "all_reduce") == values(told[1], "all_reduce") == [[3.0] * 4] * 3
    ring = job.ring(0)
    delayed = ring[ring["fired"].notna()]
    assert delayed["seq"].tolist() == [2]
    assert (delayed["duration_s"] >= 0.3).all()
    assert job.fired() == [(0, "ncclAllReduce", 2)]
    assert [line["text"] for line in job.log("ended")] == ["time is up"]


def test_block_holds_the_call_until_it_is_released(start):
    job = start(THREE, "nccl:block,rank=1,call=ncclAllReduce,nth=2")
    job.eventually(lambda: bool((job.ring(1)["in_flight"] & job.ring(1)["fired"].notna()).any()), "rank 1 is blocked")
    stuck = job.ring(1)
    assert stuck[stuck["in_flight"]]["seq"].tolist() == [2]
    (job.folder.parent / "faults.plan.release").touch()
    told = job.finish()
    assert values(told[1], "all_reduce") == [[3.0] * 4] * 3
    assert [line["text"] for line in job.log("ended")] == ["released"]


def test_block_ends_when_the_plan_vanishes_with_the_harness_s_scratch_folder(start):
    job = start(THREE, "nccl:block,rank=1,call=ncclAllReduce,nth=1")
    job.eventually(lambda: len(job.fired()) == 1, "rank 1 is blocked")
    (job.folder.parent / "faults.plan").unlink()
    assert results(job.finish()[1], "all_reduce") == [0, 0, 0]


def test_block_ends_at_its_cap(start):
    job = start(THREE, "nccl:block,rank=1,call=ncclAllReduce,nth=1,for_s=0.2")
    assert results(job.finish()[1], "all_reduce") == [0, 0, 0]
    assert [line["text"] for line in job.log("ended")] == ["time is up"]


def test_a_blocked_call_ends_when_its_communicator_is_aborted_and_never_touches_it_again(start):
    steps = {0: [["init"], ["abort_soon", "go"], ["all_reduce"]], 1: [["init"], ["wait", "go"]]}
    job = start(steps, "nccl:block,rank=0,call=ncclAllReduce")
    job.eventually(lambda: len(job.fired()) == 1, "rank 0 is blocked")
    (job.shared / "go").touch()
    assert results(job.finish()[0], "all_reduce") == [3]
    assert [line["text"] for line in job.log("ended")] == ["the communicator was aborted or destroyed"]


def test_hole_lets_the_stream_wait_where_the_library_offers_host_functions(start):
    # The double of cuLaunchHostFunc runs at once, so here the call itself waits; on CUDA it returns and its work waits.
    job = start(THREE, "nccl:block,where=stream,rank=1,call=ncclAllReduce,nth=2,for_s=0.2", environ={"LOAD": "global"})
    assert results(job.finish()[1], "all_reduce") == [0, 0, 0]
    assert job.fired() == [(1, "ncclAllReduce", 2)]
    assert len(job.log("ended")) == 1


def test_hole_without_cuda_does_not_fire_and_says_why(start):
    job = start(THREE, "nccl:block,where=stream,rank=1,call=ncclAllReduce,nth=2", environ={"LOAD": "local"})
    assert values(job.finish()[1], "all_reduce") == [[3.0] * 4] * 3
    assert job.fired() == []
    (line,) = job.log("not_applied")
    assert line["text"] == "no cuLaunchHostFunc: libcuda is not loaded in this process"


def test_a_dropped_call_returns_success_and_the_rank_is_one_call_ahead_ever_after(start):
    job = start({0: THREE, 1: THREE}, "nccl:drop,rank=1,call=ncclAllReduce,nth=2")
    told = job.finish()
    assert results(told[1], "all_reduce") == [0, 0, 0]
    assert values(told[1], "all_reduce") == [[3.0] * 4, [2.0] * 4, [3.0] * 4]
    assert results(told[0], "all_reduce") == [0, 0, 6]
    assert job.fired() == [(1, "ncclAllReduce", 2)]


def test_a_wrong_count_moves_fewer_elements_and_leaves_the_rest(start):
    steps = [["init"], ["all_reduce", 8]]
    job = start(steps, "nccl:count,call=ncclAllReduce,nth=1")
    told = job.finish()
    assert values(told[0], "all_reduce") == [[3.0] * 4 + [1.0] * 4]
    assert values(told[1], "all_reduce") == [[3.0] * 4 + [2.0] * 4]
    ring = job.ring(0)
    assert ring[ring["call"] == "ncclAllReduce"][["count", "asked"]].values.tolist() == [[4, 8]]
    assert {line["text"] for line in job.log("fired")} == {"count 8 -> 4"}


def test_a_count_that_would_grow_is_refused_at_the_call(start):
    job = start([["init"], ["all_reduce", 4]], "nccl:count,call=ncclAllReduce,count=4000000000")
    assert values(job.finish()[0], "all_reduce") == [[3.0] * 4]
    assert job.fired() == []
    assert {line["text"] for line in job.log("not_applied")} == {"the count would not become smaller"}


def test_a_wrong_root_sends_another_rank_s_data(start):
    job = start([["init"], ["broadcast", 0]], "nccl:root,call=ncclBroadcast,root=1")
    told = job.finish()
    assert values(told[0], "broadcast") == values(told[1], "broadcast") == [[11, 21]]
    ring = job.ring(1)
    assert ring[ring["call"] == "ncclBroadcast"][["root", "asked"]].values.tolist() == [[1, 0]]


def test_a_wrong_operation_gives_another_result_on_that_rank_alone(start):
    told = start([["init"], ["all_reduce"]], "nccl:op,rank=1,redop=prod").finish()
    assert values(told[0], "all_reduce") == [[3.0] * 4]
    assert values(told[1], "all_reduce") == [[2.0] * 4]


def test_an_asynchronous_error_is_reported_from_the_planted_call_on(start):
    steps = [["init"], ["async_error"], ["all_reduce"], ["async_error"], ["all_reduce"], ["async_error", 2]]
    job = start(steps, "nccl:async_error,rank=1,call=ncclAllReduce,nth=2,result=ncclRemoteError")
    told = job.finish()
    assert values(told[1], "async_error") == [[0.0], [0.0], [6.0, 6.0]]
    assert values(told[0], "async_error") == [[0.0], [0.0], [0.0, 0.0]]
    assert values(told[1], "all_reduce") == [[3.0] * 4] * 2


def test_an_asynchronous_error_may_start_with_the_nth_poll(start):
    told = start([["init"], ["async_error", 4]], "nccl:async_error,rank=0,nth=3").finish()
    assert values(told[0], "async_error") == [[0.0, 0.0, 6.0, 6.0]]


def test_a_failing_group_end_still_closes_the_group(start):
    steps = {
        rank: [["init"], ["group_start"], ["send", 1 - rank], ["recv", 1 - rank], ["group_end"], ["all_reduce"]]
        for rank in (0, 1)
    }
    told = start(steps, "nccl:fail,rank=0,call=ncclGroupEnd,result=ncclInternalError").finish()
    assert results(told[0], "group_end") == [3]
    assert results(told[1], "group_end") == [0]
    assert values(told[0], "all_reduce") == [[3.0] * 4]


@pytest.mark.parametrize(
    ("aim", "calls"),
    [
        ("nth=2+5", [2, 5]),
        ("every=3", [3, 6]),
        ("every=2,times=2", [2, 4]),
        ("times=2", [1, 2]),
        ("after_s=3600", []),
        ("comm=0", [1, 2, 3, 4, 5, 6]),
        ("comm=1", []),
    ],
)
def test_calls_are_aimed_at_by_number_time_and_communicator(start, aim, calls):
    job = start([["init"], *[["all_reduce"]] * 6], f"nccl:delay,rank=1,call=ncclAllReduce,seconds=0.001,{aim}")
    job.finish()
    assert job.fired() == [(1, "ncclAllReduce", number) for number in calls]


def test_a_communicator_is_aimed_at_by_the_id_that_all_ranks_share(start):
    steps = [["init"], ["split", 0, 0], ["all_reduce", 1, 0, 0], ["all_reduce", 1, 0, 1]]
    job = start(steps)
    job.finish()
    ring = job.rings()
    shared = ring[ring["call"] == "ncclAllReduce"].groupby("comm_index")["comm"].nunique()
    assert shared.tolist() == [1, 1]
    index = start(steps, "nccl:fail,call=ncclAllReduce,comm=1")
    told = index.finish()
    assert [results(told[rank], "all_reduce") for rank in (0, 1)] == [[0, 2], [0, 2]]


def test_a_family_is_aimed_at_by_its_plain_name_and_a_member_by_its_own(start):
    steps = [["init"], ["broadcast"], ["bcast"]]
    both, one = start(steps, "nccl:fail,call=ncclBroadcast"), start(steps, "nccl:fail,call=ncclBcast")
    assert [line["result"] for line in both.finish()[0]] == [0, 2, 2]
    assert [line["result"] for line in one.finish()[0]] == [0, 0, 2]


def test_without_a_rank_in_the_environment_the_first_communicator_s_rank_counts(start):
    job = start(THREE, "nccl:delay,rank=1,call=ncclAllReduce,nth=1,seconds=0.001", ranked=False)
    job.finish()
    assert job.fired() == [(1, "ncclAllReduce", 1)]


def test_chance_is_repeatable_by_its_seed_and_differs_between_ranks_and_seeds(start):
    steps = [["init"], *[["all_reduce", 1]] * 60]
    fault = "nccl:delay,call=ncclAllReduce,seconds=0.0001,probability=0.3"

    def fired(seed):
        job = start(steps, fault, seed=seed)
        job.finish()
        return job.fired()

    first = fired(1)
    assert fired(1) == first
    assert fired(2) != first
    ranks = [{number for rank, _, number in first if rank == own} for own in (0, 1)]
    assert ranks[0] != ranks[1]
    assert all(5 <= len(numbers) <= 35 for numbers in ranks)


def test_several_faults_of_one_plan_keep_to_their_own_calls(start):
    job = start(
        THREE,
        "nccl:delay,rank=0,call=ncclAllReduce,nth=1,seconds=0.001",
        "nccl:op,rank=1,call=ncclAllReduce,nth=2,redop=prod",
    )
    told = job.finish()
    assert values(told[1], "all_reduce") == [[3.0] * 4, [2.0] * 4, [3.0] * 4]
    assert values(told[0], "all_reduce") == [[3.0] * 4] * 3
    assert job.fired() == [(0, "ncclAllReduce", 1), (1, "ncclAllReduce", 2)]
