"""Who is missing where the others wait."""

from __future__ import annotations

import pytest

from dtprobe.diagnose.facts.hang import hang


def timeout(rank: int, seq: int, op: str = "ALLREDUCE", numel: int = 1000) -> str:
    return (
        f"[rank{rank}]:[E0318 07:41:02.{rank:09d} ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) ran for 600001 "
        "milliseconds before timing out."
    )


def status(rank: int, enqueued: int, completed: int) -> str:
    return (
        f"[rank{rank}]:[E0318 07:41:03.{rank:09d} ProcessGroupNCCL.cpp:1794] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a "
        f"dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL "
        f"work: {enqueued}, last completed NCCL work: {completed}."
    )


def test_the_rank_that_printed_no_time_out_is_the_one_that_is_missing(case):
    found = hang(case(*(timeout(rank, 9) for rank in (0, 1, 3))))
    assert (found.kind, found.odd, found.waiting) == ("absent", (2,), (0, 1, 3))


def test_a_rank_that_is_done_with_less_is_missing_too(case):
    found = hang(case(timeout(0, 13), status(1, 12, 12)))
    assert (found.kind, found.odd) == ("absent", (1,))


def test_another_operation_under_the_same_number(case):
    found = hang(case(timeout(0, 9, "ALLGATHER"), timeout(1, 9), timeout(2, 9)))
    assert (found.kind, found.odd) == ("other-operation", (0,))


def test_another_size_under_the_same_number(case):
    found = hang(case(timeout(0, 9), timeout(1, 9), timeout(2, 9, numel=700)))
    assert (found.kind, found.odd) == ("other-size", (2,))


def test_of_two_ranks_the_one_that_enqueued_less_is_odd(case):
    found = hang(
        case(
            timeout(0, 9),
            status(0, 9, 8),
            timeout(1, 9, numel=1),
            status(1, 12, 8),
        )
    )
    assert found.odd == (0,)


def test_nobody_is_odd_where_all_wait_alike(case):
    found = hang(case(*(timeout(rank, 9) for rank in range(4))))
    assert (found.kind, found.odd) == ("nobody", ())


def test_most_ranks_cannot_be_missing(case):
    found = hang(case("[rank7]: hello", timeout(0, 9), timeout(1, 9)))
    assert found.kind == "some"
    assert found.odd == ()


def test_sends_and_receives_are_told_apart_from_collectives(case):
    assert hang(case(timeout(0, 1, "RECV"), timeout(1, 1, "RECV"))).kind == "p2p"


def test_there_is_no_hang_without_a_time_out(case):
    assert hang(case("[rank0]: all is well", "[rank1]: all is well")) is None


def test_a_root_that_scatters_is_not_odd_for_its_size(case):
    assert hang(case(timeout(0, 9, "SCATTER", 4096), timeout(1, 9, "SCATTER", 0), timeout(2, 9, "SCATTER", 0))).kind == "nobody"


def gave_up(rank: int, tag: str, inner: int, sizes: tuple[int, int] = (512, 512), op: str = "ALLREDUCE") -> list[str]:
    head = f"[rank{rank}]:[E0611 02:17:05.{rank:09d} ProcessGroupNCCL.cpp:"
    return [
        f"{head}607] [Rank {inner}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=31, OpType={op}, NumelIn={sizes[0]}, "
        f"NumelOut={sizes[1]}, Timeout(ms)=900000) ran for 900020 milliseconds before timing out.",
        f"{head}1664] [{tag} Rank {inner}] Exception (either an error or timeout) detected by watchdog at work: 31, last enqueued "
        "NCCL work: 31, last completed NCCL work: 30.",
    ]


@pytest.mark.parametrize(
    "tag", ["PG 0", "PG 2", "PG ID 0 PG GUID 0", "PG ID 1 PG GUID 1(mesh_dp)", "PG ID 4 PG GUID 9(EXPERT_GROUP)"]
)
def test_whatever_its_group_is_called_the_silent_rank_is_missing(case, tag):
    found = hang(case(*(line for rank in (0, 1, 3) for line in gave_up(rank, tag, rank))))
    assert (found.kind, found.odd, found.waiting) == ("absent", (2,), (0, 1, 3))


def test_sizes_of_a_gather_tell_of_a_member_that_nothing_names(case):
    lines = [line for rank in (0, 1, 2) for line in gave_up(rank, "PG ID 2 PG GUID 3(dp)", rank, (64, 256), "_ALLGATHER_BASE")]
    found = hang(case(*lines))
    assert (found.kind, found.odd) == ("absent", (3,))


def test_ranks_within_the_group_tell_how_its_members_follow_each_other(case):
    lines = [line for inner in (0, 1, 3) for line in gave_up(1 + 2 * inner, "PG ID 2 PG GUID 5(mesh_dp)", inner)]
    found = hang(case(*lines, "world_size: 8"))
    assert (found.kind, found.odd) == ("absent", (5,))


def test_a_small_group_of_a_large_job_misses_nobody_of_the_others(case):
    lines = [line for inner in (0, 1) for line in gave_up(4 + inner, "PG ID 1 PG GUID 6(mesh_tp)", inner)]
    found = hang(case(*lines, "world_size: 8"))
    assert (found.kind, found.odd) == ("nobody", ())
