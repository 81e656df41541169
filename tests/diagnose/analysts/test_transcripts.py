"""What stands beside a job's logs names a rank only where it belongs to one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dtprobe.diagnose.analysts import transcripts
from dtprobe.diagnose.case import Case

FAILED = "E0101 10:00:00.000000 5 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 1 (pid: 771) of binary: python"
STEPS = [f"[rank{rank}]: step 4" for rank in range(2)]


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("$ sudo kill -9 771", [("rank-killed", 1)]),
        ("Jan 01 10:00:00 a sudo[3]: carol : USER=root ; COMMAND=/bin/kill -KILL 770 771", [("rank-killed", 1)]),
        ("# kill -STOP 771", [("rank-stopped", 1)]),
        ("$ kill -9 9000", []),
        ("$ kill -CONT 771", []),
        ("$ kill -TERM 771", []),
    ],
)
def test_a_typed_kill_counts_where_it_struck_a_rank_in_that_way(
    case: Callable[..., Case], typed: str, found: list[tuple[str, int]]
) -> None:
    told = transcripts.analyse(case(**{"job.log": [*STEPS, FAILED], "history.txt": [typed]}))
    assert [(one.mode, one.first) for one in told] == found


def test_a_clock_that_is_off_decides_only_where_heartbeats_were_judged(case: Callable[..., Case]) -> None:
    off = "System time     : 61.300000 seconds slow of NTP time"
    aged = "the node(s) 'b_1_0' have been removed from the rendezvous 'r' since they had no heartbeat."
    (alone,) = transcripts.analyse(case(**{"t.txt": [off], "job.log": STEPS}))
    (joined,) = transcripts.analyse(case(**{"t.txt": [off], "job.log": [*STEPS, aged]}))
    assert alone.likelihood < 0.5 < joined.likelihood
    assert list(transcripts.analyse(case(off.replace("61.3", "0.0")))) == []


@pytest.mark.parametrize(("went", "first"), [("big1", 0), ("other7", None)])
def test_a_host_that_went_is_the_store_s_only_where_the_peers_led_to_it(
    case: Callable[..., Case], went: str, first: int | None
) -> None:
    lost = "[rank8]:[W101 10:00:31.000000001 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=6, addr=[big2]:43, remote=[big1]:29511): Connection reset by peer"
    found = list(transcripts.analyse(case(**{"s.log": [f"error: Nodes {went} not responding, setting DOWN"], "j.log": [lost]})))
    assert [(one.mode, one.first) for one in found] == ([] if first is None else [("store-host-lost", first)])
