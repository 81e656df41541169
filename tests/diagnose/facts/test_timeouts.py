"""Time-outs of every release are read, each rank's first in each group."""

from __future__ import annotations

import pytest

from dtprobe.diagnose.facts.timeouts import waits

OLD = "[E ProcessGroupNCCL.cpp:737] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, TensorShape=[4, 5], Timeout(ms)=1800000) ran for 1800100 milliseconds before timing out."
NEW = "[rank5]:[E0318 07:41:02.000000001 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=_ALLGATHER_BASE, NumelIn=8, NumelOut=32, Timeout(ms)=600000) ran for 600050 milliseconds before timing out."
STATUS = "[rank5]:[E0318 07:41:02.000000002 ProcessGroupNCCL.cpp:2168] [PG ID 2 PG GUID 7(tp) Rank 1]  failure detected by watchdog at work sequence id: 12 PG status: last enqueued work: 14, last completed work: 11"


def test_a_shape_is_counted_in_elements_where_the_release_prints_no_numel(case):
    (one,) = waits(case(OLD)).timeouts
    assert (one.rank, one.op, one.numel_in, one.seq) == (3, "ALLREDUCE", 20, None)


def test_the_tag_names_the_global_rank_and_the_status_line_the_group(case):
    (one,) = waits(case(NEW, STATUS)).timeouts
    assert (one.rank, one.group, one.op) == (5, "7(tp)", "ALLGATHER_BASE")


def test_a_repeated_time_out_counts_once(case):
    again = NEW.replace("[Rank 1] Watchdog", "Process group watchdog thread terminated with exception: [Rank 1] Watchdog")
    assert len(waits(case(NEW, STATUS, again)).timeouts) == 1


def test_the_stuck_collective_began_before_its_line_by_how_long_it_ran(case):
    (one,) = waits(case("2025-03-18 07:00:00 start", NEW)).timeouts
    assert one.line.t_ns is not None
    assert one.began_ns == one.line.t_ns - 600_050_000_000


@pytest.mark.parametrize(
    "line",
    [
        "[rank1]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 1] Timeout at NCCL work: 7, last enqueued NCCL work: 9, last completed NCCL work: 6.",
        "[rank1]:[E0318 07:41:02.1 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 1] Exception (either an error or timeout) detected by watchdog at work: 7, last enqueued NCCL work: 9, last completed NCCL work: 6.",
        "[rank1]:[E0318 07:41:02.1 ProcessGroupNCCL.cpp:1794] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: 9, last completed NCCL work: 6.",
    ],
)
def test_how_far_a_rank_got_is_read_in_every_wording(case, line):
    (one,) = waits(case(line)).statuses
    assert (one.rank, one.enqueued, one.completed) == (1, 9, 6)


def test_the_printed_stack_belongs_to_the_rank_above_it(case):
    found = waits(
        case(
            NEW.replace("rank5", "rank1"),
            "[rank1]:[E0318 07:41:03.1 ProcessGroupNCCL.cpp:667] Stack trace of the failed collective: ",
            "#0 all_reduce from /env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:2501",
            "#1 step from /w/loop.py:14",
            "",
        )
    )
    assert found.timeouts[0].place == "step from /w/loop.py:14"


def test_the_short_line_alone_tells_of_a_time_out_too(case):
    line = "[rank1]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 1] Timeout at NCCL work: 7, last enqueued NCCL work: 9, last completed NCCL work: 6."
    (one,) = waits(case(line)).timeouts
    assert (one.rank, one.seq, one.op) == (1, 7, None)
