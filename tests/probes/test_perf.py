from __future__ import annotations

import signal
import time

import pytest

from dtprobe.errors import UsageError
from dtprobe.probes.perf import Perf
from dtprobe.readers.perf import read_perf_script, read_perf_stat

PROGRAM = """
import os, sys, threading, time
for _ in range(7):
    thread = threading.Thread(target=print, args=("in a thread",))
    thread.start(); thread.join()
print("ready", flush=True)
if "STAY" in os.environ:
    time.sleep(600)
"""


def unless_available(probe):
    if why := probe.probe():
        pytest.skip(str(why))


def test_every_thread_that_a_rank_starts_is_a_sample_at_its_time_and_counts_are_kept(ranks):
    unless_available(Perf())
    job = ranks(2)
    began_ns = time.time_ns()
    job.under(Perf())
    job.run(PROGRAM)
    assert job.wait() == [0, 0]
    recorded = job.stop()
    assert not recorded.problems
    for rank, child in enumerate(job.children):
        samples = read_perf_script(job.rank(rank) / "perf.script.txt")
        clones = samples[samples["event"].str.startswith("syscalls:sys_enter_clone")]
        assert len(clones) == 7 and set(clones["pid"]) == {child.pid}
        assert clones["t_ns"].between(began_ns, time.time_ns()).all()
        counts = read_perf_stat(job.rank(rank) / "perf.stat.txt").set_index("event")["count"]
        assert counts["page-faults"] > 100
    assert sorted(file.name for file in job.rank(0).iterdir()) == [
        *("perf.data", "perf.script.txt", "perf.stat.txt", "stderr.log", "stdout.log"),
    ]


def test_a_stopped_and_a_killed_rank_keep_nobody_waiting(ranks):
    unless_available(Perf())
    job = ranks(2)
    job.under(Perf())
    job.run(PROGRAM, {"STAY": "1"})
    for rank in (0, 1):
        job.until(job.says(rank, "ready"), "ready")
    job.children[0].send_signal(signal.SIGSTOP)
    job.children[1].kill()
    recorded = job.stop()
    assert not recorded.problems
    assert len(read_perf_script(job.rank(0) / "perf.script.txt")) >= 7


def test_an_event_that_the_kernel_does_not_have_is_a_problem_with_perfs_own_words(ranks):
    unless_available(Perf())
    job = ranks(1)
    job.under(Perf(record=("sched:nosuch",), count=()))
    job.run(PROGRAM)
    assert job.wait() == [0]
    recorded = job.stop()
    assert "rank 0: perf record did not attach" in recorded.problems[0] and not recorded.files


def test_without_anything_to_record_or_with_an_option_for_an_event_it_is_refused():
    with pytest.raises(UsageError, match="nothing to record"):
        Perf(record=(), count=())
    with pytest.raises(UsageError, match="to record"):
        Perf(record=("sched:x --help",))
