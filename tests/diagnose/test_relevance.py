"""Trouble that a job got over, and what the kernel says of other processes, is not its failure."""

from __future__ import annotations

from dtprobe.diagnose.analysts import conclude
from dtprobe.diagnose.case import Finding, Quote
from dtprobe.diagnose.decide import decide
from dtprobe.diagnose.relevance import relevant

REFUSED = "[rank1]:[W318 07:00:00.000000000 socket.cpp:767] [c10d] The IPv4 network addresses of (head, 29500) cannot be retrieved (gai error: -2 - Name or service not known)."
KILLED = "[Tue Mar 18 07:41:10 2025] Memory cgroup out of memory: Killed process {pid} (python3) total-vm:2157228kB, anon-rss:509000kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1000kB oom_score_adj:0"
ROW = ["  host      : n7", "  rank      : {rank} (local_rank: {rank})", "  exitcode  : {code} (pid: {pid})"]


def ended(rank: int, code: int, pid: int) -> list[str]:
    return [line.format(rank=rank, code=code, pid=pid) for line in ROW]


def answer(read):
    return decide(read, *conclude(read))


def test_a_name_that_did_not_resolve_at_first_is_no_failure_of_a_job_that_trained(case):
    steps = [f"[rank{rank}]: step {step}" for step in (1, 2, 3) for rank in (0, 1)]
    seen, trained = case(REFUSED), case(REFUSED, *steps)
    shown = (Quote(file="all.log", line=1, text=REFUSED, role="cause"),)
    found = [Finding(mode="dns-resolution-failure", analyst="test", likelihood=0.8, because="So.", evidence=shown)]
    assert relevant(seen, found) == found
    assert relevant(trained, found)[0].likelihood < 0.5


def test_warnings_of_the_start_do_not_make_a_job_ill_that_ended_well(case):
    assert answer(case(REFUSED, "[rank0]: training finished", "[rank1]: training finished")).failure_mode == "healthy"


def test_the_kernel_s_kill_of_a_rank_is_its_failure(case):
    read = case(
        **{
            "kernel.txt": [KILLED.format(pid=71)],
            "job.log": [*ended(0, -9, 71), *ended(1, -15, 72)],
        }
    )
    assert (answer(read).failure_mode, answer(read).first_failing_rank) == ("host-oom-kill", 0)


def test_the_kernel_s_kill_of_another_s_process_is_not(case):
    read = case(
        **{
            "kernel.txt": [KILLED.format(pid=9999)],
            "job.log": [*ended(0, 1, 71), *ended(1, 1, 72)],
        }
    )
    assert answer(read).failure_mode != "host-oom-kill"
