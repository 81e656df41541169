"""A rank that torchrun neither saw fail nor had to end."""

from __future__ import annotations

from collections.abc import Callable

from dtprobe.diagnose.analysts import absent
from dtprobe.diagnose.case import Case

WAITED = (
    "[rank0]:[E1029 10:00:00.1 ProcessGroupNCCL.cpp:689] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=10000) ran for 10020 milliseconds before timing out."
)
SEATS = [
    f"box:{60 + rank}:{60 + rank} [{rank}] NCCL INFO comm 0x1 rank {rank} nranks 2 cudaDev {rank} nvmlDev {rank} busId {rank + 1}b000 commId 0xa - Init COMPLETE"
    for rank in (0, 1)
]
TABLE = [
    "Failures:",
    "  <NO_OTHER_FAILURES>",
    "Root Cause (first observed failure):",
    "[0]:",
    "  time      : 2026-10-29_10:00:20",
    "  host      : box",
    "  rank      : 0 (local_rank: 0)",
    "  exitcode  : -6 (pid: 60)",
    "  error_file: <N/A>",
]
SIGNALLED = (
    "W1029 10:00:19.000000 50 torch/distributed/elastic/multiprocessing/api.py:1012] Sending process 61 closing signal SIGTERM"
)


def test_it_had_ended_with_success(case: Callable[..., Case]) -> None:
    (found,) = absent.analyse(case(*SEATS, WAITED, *TABLE))
    assert (found.mode, found.first) == ("peer-exited-early", 1)


def test_one_that_had_to_be_ended_ran_still(case: Callable[..., Case]) -> None:
    assert list(absent.analyse(case(*SEATS, WAITED, SIGNALLED, *TABLE))) == []
