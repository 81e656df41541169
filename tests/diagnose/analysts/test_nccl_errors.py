"""Errors that NCCL returned to torch, and communicators that were not made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dtprobe.diagnose.analysts import nccl_errors, nccl_makings
from dtprobe.diagnose.case import Case

SOURCE = "../torch/csrc/distributed/c10d/"


def raised(rank: int, where: str, what: str, code: str, last: str = "") -> list[str]:
    tag = f"[rank{rank}]: "
    return [
        tag + "Traceback (most recent call last):",
        tag + '  File "train.py", line 9, in step',
        tag + f"torch.distributed.DistBackendError: NCCL error in: {SOURCE}{where}:120, {what}, NCCL version 2.21.5",
        tag + f"{code}: words about it",
        tag + "Last error:",
        tag + last if last else "",
    ]


@pytest.mark.parametrize(
    ("where", "what", "code", "mode"),
    [
        (
            "NCCLUtils.cpp",
            "unhandled system error (run with NCCL_DEBUG=INFO for details)",
            "ncclSystemError",
            "nccl-init-failure",
        ),
        (
            "NCCLUtils.hpp",
            "internal error - please report this issue to the NCCL developers",
            "ncclInternalError",
            "nccl-init-failure",
        ),
        (
            "ProcessGroupNCCL.cpp",
            "internal error - please report this issue to the NCCL developers",
            "ncclInternalError",
            "nccl-internal-error",
        ),
        (
            "ProcessGroupNCCL.cpp",
            "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
            "ncclUnhandledCudaError",
            "nccl-cuda-error",
        ),
        (
            "ProcessGroupNCCL.cpp",
            "remote process exited or there was a network error",
            "ncclRemoteError",
            "nccl-remote-error",
        ),
    ],
)
def test_where_the_error_came_up_decides(case: Callable[..., Case], where: str, what: str, code: str, mode: str) -> None:
    (found,) = nccl_errors.analyse(case("loss 1.0", *raised(3, where, what, code)))
    assert (found.mode, found.first, found.suspects) == (mode, 3, (3,))
    assert [quote.text.rpartition("]: ")[2].split(":")[0] for quote in found.evidence][1] == code


def test_an_old_torch_makes_communicators_in_init_process_group(case: Callable[..., Case]) -> None:
    lines = raised(0, "ProcessGroupNCCL.cpp", "unhandled system error", "ncclSystemError")
    lines.insert(2, '[rank0]:   File "c10d.py", line 7, in init_process_group')
    (found,) = nccl_errors.analyse(case(*lines))
    assert found.mode == "nccl-init-failure"


def test_nccl_s_own_words_are_evidence(case: Callable[..., Case]) -> None:
    (found,) = nccl_errors.analyse(
        case(
            *raised(
                1,
                "NCCLUtils.cpp",
                "invalid usage (run with NCCL_DEBUG=WARN for details)",
                "ncclInvalidUsage",
                "Reduce : invalid root 9",
            )
        )
    )
    assert "invalid root 9" in found.evidence[2].text
    assert found.not_proven == ""


def making(pid: int, rank: int, comm: str) -> str:
    return (
        f"box:{pid}:{pid} [{rank}] NCCL INFO ncclCommInitRankConfig comm 0x1 rank {rank} nranks 2 cudaDev {rank} nvmlDev {rank} busId {rank + 1}b000"
        f" commId {comm} - Init START"
    )


REFUSED = "box:32:32 [1] NCCL INFO socketPollConnect: connect to 198.51.100.3<4711> returned Connection refused, retrying (3/34) after sleep for 300 msec"


def test_a_restart_that_reads_the_last_attempt_s_id(case: Callable[..., Case]) -> None:
    first, again = [making(11, 0, "0xaa"), making(12, 1, "0xaa")], [making(32, 1, "0xaa"), REFUSED, making(31, 0, "0xbb")]
    (found,) = nccl_makings.analyse(case(*first, *again))
    assert (found.mode, found.first, found.suspects) == ("restart-stale-store", None, (0, 1))
    assert list(nccl_makings.analyse(case(*again))) == []  # nothing was restarted: a network that refuses looks so, too


def test_one_makes_a_group_while_another_waits_for_the_id_of_another(case: Callable[..., Case]) -> None:
    def dump(pid: int, *frames: str) -> list[str]:
        return [f"Process {pid}: python t.py", f'Thread {pid} (active): "MainThread"', *(f"    {one}" for one in frames)]

    calls = ["all_reduce (torch/distributed/distributed_c10d.py:3068)", "step (train.py:5)"]
    makes = dump(40, "accept (libc.so.6)", "bootstrapInit (bootstrap.cc:714)", "ncclCommInitRankConfig (init.cc:2162)", *calls)
    waits = dump(41, "poll (libc.so.6)", "c10d::TCPStore::doWait (libtorch_cpu.so)", *calls)
    (found,) = nccl_makings.analyse(case(**{"stack_rank0.txt": makes, "stack_rank1.txt": waits}))
    assert (found.mode, found.first, found.suspects) == ("cross-communicator-deadlock", None, (0, 1))
    assert list(nccl_makings.analyse(case(**{"stack_rank0.txt": makes, "stack_rank1.txt": makes}))) == []
