"""The calls that NCCL logged, compared across ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dtprobe.diagnose.analysts import nccl_calls
from dtprobe.diagnose.case import Case

STEP = ["W AllReduce 4096", "W AllReduce 64", "W AllReduce 1"]
STACK = [
    "Process 902: python train.py",
    "Python v3.12.3 (/usr/bin/python3.12)",
    "",
    'Thread 902 (active): "MainThread"',
    "    barrier (torch/distributed/distributed_c10d.py:5030)",
    "    wrapper (torch/distributed/c10d_logger.py:83)",
    "    main (train.py:88)",
]


@pytest.mark.parametrize(
    ("odd", "mode"),
    [
        ("W AllGather 4096", "collective-type-mismatch"),
        ("W AllReduce 4096 datatype=6", "collective-dtype-mismatch"),
        ("W AllReduce 2048", "collective-shape-mismatch"),
        ("W AllReduce 4096 op=1", "reduce-op-mismatch"),
    ],
)
def test_one_rank_s_other_call_is_found_by_what_the_most_call(
    case: Callable[..., Case], nccl_logs, odd: str, mode: str
) -> None:
    calls = {rank: [*STEP, *STEP, STEP[0]] for rank in (0, 1, 3)} | {2: [*STEP, *STEP, odd]}
    (found,) = nccl_calls.analyse(case(**nccl_logs(calls)))
    assert (found.mode, found.first, found.suspects) == (mode, 2, (2,))
    assert {quote.file for quote in found.evidence} == {"nccl.902.log", "nccl.900.log"}
    assert odd.split()[1] in found.evidence[0].text


def test_of_two_ranks_the_odd_one_is_the_one_that_leaves_its_own_pattern(case: Callable[..., Case], nccl_logs) -> None:
    calls = {0: [*STEP, *STEP, "W Broadcast 4096"], 1: [*STEP, *STEP, STEP[0], STEP[1]]}
    (found,) = nccl_calls.analyse(case(**nccl_logs(calls)))
    assert (found.mode, found.first, found.suspects) == ("collective-type-mismatch", 0, (0, 1))


def test_only_this_log_shows_a_root(case: Callable[..., Case], nccl_logs) -> None:
    same = ["W Broadcast 8 root=0"] * 3
    calls = {0: same, 1: [*same[:2], "W Broadcast 8 root=2"], 2: same}
    (found,) = nccl_calls.analyse(case(**nccl_logs(calls)))
    assert (found.mode, found.first) == ("broadcast-root-mismatch", 1)


def test_a_call_left_out_is_told_from_another_call(case: Callable[..., Case], nccl_logs) -> None:
    calls = {0: [*STEP, *STEP], 1: [*STEP, *STEP[1:]], 2: [*STEP, *STEP]}
    (found,) = nccl_calls.analyse(case(**nccl_logs(calls)))
    assert (found.mode, found.first) == ("collective-skipped", 1)
    assert "left out 1" in found.because


def test_the_same_calls_in_another_order(case: Callable[..., Case], nccl_logs) -> None:
    calls = {0: [*STEP], 1: [STEP[1], STEP[0], STEP[2]], 2: [*STEP]}
    (found,) = nccl_calls.analyse(case(**nccl_logs(calls)))
    assert (found.mode, found.first) == ("collective-order-mismatch", 1)


def test_a_rank_in_the_last_barrier_left_the_loop_early(case: Callable[..., Case], nccl_logs) -> None:
    calls = {rank: [*STEP, *STEP, STEP[0]] for rank in (0, 1, 3)} | {2: [*STEP, *STEP, "W AllReduce 1"]}
    logs = nccl_logs(calls)
    assert [one.mode for one in nccl_calls.analyse(case(**logs))] == ["collective-shape-mismatch"]
    (found,) = nccl_calls.analyse(case(**logs, **{"stack.902": STACK}))
    assert (found.mode, found.first) == ("uneven-dataloader-desync", 2)


def test_a_rank_behind_is_a_lead_and_no_more(case: Callable[..., Case], nccl_logs) -> None:
    (found,) = nccl_calls.analyse(case(**nccl_logs({0: [*STEP, STEP[0]], 1: STEP})))
    assert (found.mode, found.first) == ("collective-skipped", 1)
    assert found.likelihood < 0.7


def test_two_groups_entered_crosswise(case: Callable[..., Case], nccl_logs) -> None:
    calls = {0: [*STEP, "A AllReduce 8", "B AllReduce 8"], 1: [*STEP, "B AllReduce 8", "A AllReduce 8"]}
    (found,) = nccl_calls.analyse(case(**nccl_logs(calls, made=("W", "A", "B"))))
    assert (found.mode, found.first, found.suspects) == ("cross-communicator-deadlock", None, (0, 1))
    assert len(found.evidence) == 4


def test_groups_entered_in_one_order_are_fine(case: Callable[..., Case], nccl_logs) -> None:
    calls = {rank: [*STEP, "A AllReduce 8", "B AllReduce 8"] for rank in (0, 1)}
    assert list(nccl_calls.analyse(case(**nccl_logs(calls, made=("W", "A", "B"))))) == []


@pytest.mark.parametrize(
    ("calls", "mode", "suspects"),
    [
        ({0: ["W Recv 8 root=1"], 1: ["W Recv 8 root=0"]}, "p2p-unpaired", (0, 1)),
        ({0: ["W Send 8 root=1"], 1: ["W Send 8 root=0"]}, "send-send-deadlock", (0, 1)),
        ({0: ["W Recv 8 root=1"], 1: STEP}, "p2p-unpaired", (0, 1)),
        ({0: ["W Send 8 root=1"], 1: ["W Recv 8 root=0"]}, None, ()),
    ],
)
def test_sends_and_receives_without_partner(
    case: Callable[..., Case], nccl_logs, calls: dict[int, list[str]], mode: str | None, suspects: tuple[int, ...]
) -> None:
    found = [one for one in nccl_calls.analyse(case(**nccl_logs(calls))) if one.mode != "collective-skipped"]
    assert [one.mode for one in found] == ([] if mode is None else [mode])
    assert all(one.suspects == suspects for one in found)
