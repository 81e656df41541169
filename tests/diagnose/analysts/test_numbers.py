"""Numbers that ranks print: what differs between replicas, what waits for input, what runs over the slower path."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dtprobe.diagnose.analysts import feeding, numbers, pace, placement, slow_path
from dtprobe.diagnose.case import Case


def _steps(line: Callable[[int, int], str], ranks: int = 4, steps: int = 5) -> list[str]:
    return [line(rank, step) for step in range(steps) for rank in range(ranks)]


def test_the_rank_that_holds_another_scale_is_named(case: Callable[..., Case]) -> None:
    said = _steps(lambda rank, step: f"[rank{rank}] step {step} loss_scale={512 if rank == 2 and step > 3 else 1024}")
    (found,) = numbers.analyse(case(*said))
    assert (found.mode, found.first) == ("scaler-divergence", 2)


@pytest.mark.parametrize(
    "line",
    [
        lambda rank, step: f"[rank{rank}] step {step} loss_scale={1024 << (step > 2)}",  # it grows everywhere
        lambda rank, step: f"[rank{rank}] step {step} batch hash {rank * 31 + step}",  # each rank has its own
        lambda rank, step: f"[rank{rank}] step {step} loss {rank + step}",
    ],
)
def test_what_is_equal_or_each_rank_s_own_is_nobody_s_fault(case: Callable[..., Case], line: Callable[[int, int], str]) -> None:
    assert list(numbers.analyse(case(*_steps(line)))) == []


@pytest.mark.parametrize(
    ("times", "found"),
    [
        ("time 2.00 data 1.80", ["data-starvation"]),
        ("time: 2.000  data_time: 1.800", ["data-starvation"]),
        ("fetch 900 ms fwd 100 ms bwd 200 ms", ["data-starvation"]),
        ("dataloader 81 % of the step", ["data-starvation"]),
        ("time 2.00 data 0.10", []),
        ("time 0.010 data 0.009", []),
    ],
)
def test_the_share_of_input_in_a_step(case: Callable[..., Case], times: str, found: list[str]) -> None:
    assert [one.mode for one in feeding.analyse(case(*[f"iter {step} {times}" for step in range(6)]))] == found


def test_a_slow_first_batch_is_no_starvation(case: Callable[..., Case]) -> None:
    lines = [f"iter {step} time {9.0 if step == 0 else 1.0} data {8.9 if step == 0 else 0.1}" for step in range(6)]
    assert list(feeding.analyse(case(*lines))) == []


def test_sockets_beside_a_fabric_count_where_a_rate_is_low(case: Callable[..., Case]) -> None:
    log = ["a:5:6 [0] NCCL INFO Using network Socket", "# Avg bus bandwidth    : 0.9"]
    port = ["        State: Active", "        Rate: 200", "        Link layer: InfiniBand"]
    (slow,) = slow_path.analyse(case(**{"n.log": log, "ib.txt": port}))
    (unmeasured,) = slow_path.analyse(case(**{"n.log": log[:1], "ib.txt": port}))
    assert slow.likelihood > 0.5 > unmeasured.likelihood
    assert list(slow_path.analyse(case(*log))) == []


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["#SBATCH --ntasks=2", "0: RANK=0 WORLD_SIZE=1", "1: RANK=0 WORLD_SIZE=1"], ["nested-launcher"]),
        (["#SBATCH --ntasks=2", "0: RANK=0 WORLD_SIZE=2", "1: RANK=1 WORLD_SIZE=2"], []),
        (["#SBATCH --ntasks=1", "0: RANK=0 WORLD_SIZE=1"], []),
    ],
)
def test_tasks_that_each_see_a_world_of_one(case: Callable[..., Case], lines: list[str], found: list[str]) -> None:
    steps = _steps(lambda rank, step: f"{rank}: step {step} loss 2.1", ranks=2)
    assert [one.mode for one in placement.analyse(case(*lines, *steps))] == found


def test_who_hardly_waits_is_waited_for(case: Callable[..., Case]) -> None:
    lines = _steps(lambda rank, step: f"[rank{rank}] step {step} total 2.0s wait {0.05 if rank == 3 else 0.9}s")
    (found,) = pace.analyse(case(*lines))
    assert (found.mode, found.first) == ("straggler", 3)
    even = _steps(lambda rank, step: f"[rank{rank}] step {step} total 2.0s wait 0.{9 - rank}s")
    assert list(pace.analyse(case(*even))) == []


def test_a_gpu_far_below_its_neighbours_clock(case: Callable[..., Case]) -> None:
    head = "index, clocks.sm [MHz], power.draw [W]"
    (found,) = pace.analyse(case(head, "0, 1980 MHz, 600 W", "1, 1965 MHz, 590 W", "2, 345 MHz, 90 W", "3, 1980 MHz, 610 W"))
    assert (found.mode, found.first) == ("straggler", 2)
    assert list(pace.analyse(case(head, *(f"{index}, 1980 MHz, 600 W" for index in range(4))))) == []
