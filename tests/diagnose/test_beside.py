"""Lines that belong to a quoted one."""

from __future__ import annotations

import pytest

from dtprobe.diagnose.beside import beside
from dtprobe.diagnose.case import quote


@pytest.mark.parametrize(
    ("lines", "quoted", "wanted"),
    [
        (
            (
                "  exitcode  : -7 (pid: 8123)",
                "  error_file: <N/A>",
                "  traceback : Signal 7 (SIGBUS) received by PID 8123",
            ),
            0,
            2,
        ),
        (
            (
                "node4:71:90 [2] transport/net_ib.cc:1290 NCCL WARN NET/IB : Got completion with status=12",
                "[rank2]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2245, remote process exited",
                "ncclRemoteError: A call failed possibly due to a network error.",
            ),
            1,
            0,
        ),
        (
            (
                "[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, unhandled system error",
                "[rank0]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed.",
                "[rank0]: Last error:",
                "[rank0]: socketStartConnect: exceeded retries (20000)",
            ),
            0,
            3,
        ),
        (
            (
                "[rank5]:[W714 TCPStore.cpp:106] [c10d] recvValue failed on SocketImpl(fd=31, remote=[trn-a]:29400): Connection reset",
                '[rank5]:[W714 ProcessGroupNCCL.cpp:1662] [PG 0 Rank 5] Failed to check the "should dump" flag on TCPStore',
            ),
            1,
            0,
        ),
    ],
)
def test_the_line_that_says_it_exactly_is_shown_beside_the_one_that_was_found(case, lines, quoted, wanted):
    read = case(*lines)
    found = beside(read, (quote(read.lines[quoted], "cause"),))
    assert wanted + 1 in [one.line for one in found]


def test_a_row_of_another_process_does_not_belong(case):
    read = case("  exitcode  : -9 (pid: 41)", "  traceback : Signal 9 (SIGKILL) received by PID 42")
    assert beside(read, (quote(read.lines[0], "cause"),)) == ()


def test_a_plain_line_has_nothing_beside_it(case):
    read = case("[rank0]: ValueError: bad", "NCCL WARN something")
    assert beside(read, (quote(read.lines[0], "cause"),)) == ()
