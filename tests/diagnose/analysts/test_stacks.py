"""What the ranks' stacks show against each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dtprobe.diagnose.analysts import stacks
from dtprobe.diagnose.case import Case

WAITS = [
    "all_reduce (torch/distributed/distributed_c10d.py:3068)",
    "wrapper (torch/distributed/c10d_logger.py:83)",
    "step (train.py:20)",
]
GPU = [
    "0x7f01 (libcuda.so.580)",
    "cuStreamSynchronize (libcuda.so.580)",
    "at::native::item (libtorch_cpu.so)",
    "step (train.py:21)",
]
ELSEWHERE = ["fetch (data.py:9)", "main (train.py:40)"]
DESTROY = ["destroy_process_group (torch/distributed/distributed_c10d.py:2184)", "main (train.py:77)"]
BARRIER = ["barrier (torch/distributed/distributed_c10d.py:5030)", "main (train.py:90)"]
SAVES = ["save_model (train.py:61)", "main (train.py:80)"]
FOREIGN = ["nanosleep (libc.so.6)", "ffi_call (libffi.so.8)", "call (_ctypes.cpython-312.so)", "main (train.py:50)"]


def dump(rank: int, frames: list[str], *, state: str = "idle", pid: int | None = None) -> list[str]:
    number = pid or 700 + rank
    head = [
        f"Process {number}: python train.py",
        "Python v3.12.3 (/usr/bin/python3.12)",
        "",
        f'Thread {number} ({state}): "MainThread"',
    ]
    return head + [f"    {frame}" for frame in frames]


def job(case: Callable[..., Case], *ranks: list[str]) -> Case:
    return case(**{f"stack_rank{rank}.txt": dump(rank, frames) for rank, frames in enumerate(ranks)})


@pytest.mark.parametrize("waits", [WAITS, GPU])
@pytest.mark.parametrize(
    ("odd", "mode"),
    [
        (ELSEWHERE, "collective-skipped"),
        (DESTROY, "cleanup-deadlock-after-exception"),
        (FOREIGN, "gil-held"),
        (SAVES, "checkpoint-storage-stall"),
    ],
)
def test_the_rank_that_is_elsewhere_while_the_others_wait(
    case: Callable[..., Case], waits: list[str], odd: list[str], mode: str
) -> None:
    found = list(stacks.analyse(job(case, waits, waits, odd, waits)))
    assert found[0].mode == mode
    assert {(one.first, one.suspects) for one in found} == {(2, (2,))}


def test_rank_0_at_work_while_the_others_stand_in_a_barrier(case: Callable[..., Case]) -> None:
    found = next(iter(stacks.analyse(job(case, ELSEWHERE, BARRIER, BARRIER))))
    assert (found.mode, found.first) == ("rank0-long-work-timeout", 0)


def test_a_rank_in_the_barrier_while_the_others_are_in_their_step(case: Callable[..., Case]) -> None:
    (found,) = stacks.analyse(job(case, GPU, BARRIER, GPU))
    assert (found.mode, found.first) == ("uneven-dataloader-desync", 1)


def test_ranks_that_all_wait_alike_blame_nobody(case: Callable[..., Case]) -> None:
    assert list(stacks.analyse(job(case, WAITS, WAITS, WAITS))) == []


def test_what_a_collective_calls_back_is_no_waiting(case: Callable[..., Case]) -> None:
    found = list(stacks.analyse(job(case, WAITS, ["hook (hooks.py:3)", *WAITS], WAITS)))
    assert [(one.mode, one.first) for one in found] == [("collective-skipped", 1)]


def test_a_main_thread_that_holds_the_lock_and_does_not_run(case: Callable[..., Case]) -> None:
    files = {f"stack_rank{rank}.txt": dump(rank, WAITS) for rank in (0, 2)}
    files["stack_rank1.txt"] = dump(1, ELSEWHERE, state="idle+gil")
    assert next(iter(stacks.analyse(case(**files)))).mode == "gil-held"
    files["stack_rank1.txt"] = dump(1, ELSEWHERE, state="active+gil")
    assert next(iter(stacks.analyse(case(**files)))).mode == "collective-skipped"


def test_a_process_that_cannot_be_suspended_was_stopped(case: Callable[..., Case]) -> None:
    refused = [
        "Process 701: python train.py",
        "Error: Failed to get stack traces",
        "",
        "Caused by:",
        "    0: Failed to suspend process",
        "    1: unexpected waitpid result PtraceEvent(Pid(701), SIGSTOP, 128) to 701",
    ]
    found = next(iter(stacks.analyse(case(**{"stack_rank0.txt": dump(0, WAITS), "stack_rank1.txt": refused}))))
    assert (found.mode, found.first) == ("rank-stopped", 1)


def test_a_forked_worker_behind_a_lock_of_its_parent(case: Callable[..., Case]) -> None:
    loader = ["wait (threading.py:324)", "_get_data (torch/utils/data/dataloader.py:1133)", "main (train.py:30)"]
    worker = ["__lll_lock_wait (libc.so.6)", "malloc (libc.so.6)", "_worker_loop (torch/utils/data/_utils/worker.py:250)"]
    own, child = dump(1, loader), dump(1, worker, pid=790)
    child.insert(2, "Parent Process 701: python train.py")
    both = case(**{"stack_rank0.txt": dump(0, WAITS), "stack_rank1.txt": [*own, "", *child]})
    (found,) = stacks.analyse(both)
    assert (found.mode, found.first) == ("dataloader-fork-deadlock", 1)
    assert found.evidence[0].text.startswith("__lll_lock_wait")
    alone = case(**{"stack_rank0.txt": dump(0, WAITS), "stack_rank1.txt": own})
    assert [one.mode for one in stacks.analyse(alone)] == ["data-starvation", "collective-skipped"]


def test_a_crash_shows_its_frame(case: Callable[..., Case]) -> None:
    log = [
        "[rank1]: Fatal Python error: Segmentation fault",
        "[rank1]: Current thread 0x00007f01 (most recent call first):",
        '[rank1]:   File "/home/u/ops.py", line 8 in fused',
    ]
    (found,) = stacks.analyse(case(*log))
    assert (found.mode, found.first) == ("sigsegv", 1)
    assert "fused" in found.because


def test_a_rank_that_came_later_was_late_and_not_lost(case: Callable[..., Case]) -> None:
    stacks_of = {f"stack_rank{rank}.txt": dump(rank, ELSEWHERE if rank == 1 else WAITS) for rank in range(3)}
    logs = {
        f"nccl_rank{rank}.log": [
            f"box:{700 + rank}:1 [{rank}] NCCL INFO comm 0x1 rank {rank} nranks 3 cudaDev {rank} busId 1b000 commId 0xa - Init COMPLETE",
            f"box:{700 + rank}:1 [{rank}] NCCL INFO comm 0x1 rank {rank} nranks 3 cudaDev {rank} busId 1b000 - Destroy COMPLETE",
        ]
        for rank in range(3)
    }
    assert [one.mode for one in stacks.analyse(case(**stacks_of))] == ["collective-skipped"]
    (found,) = stacks.analyse(case(**stacks_of, **logs))
    assert (found.mode, found.first) == ("straggler", 1)
