from __future__ import annotations

import signal
import time

import pytest

from dtprobe.errors import UsageError
from dtprobe.probes.bpf import Bpf

PROGRAM = """
import os, threading, time
for _ in range(5):
    thread = threading.Thread(target=print, args=("in a thread",))
    thread.start(); thread.join()
print("ready", flush=True)
if "STAY" in os.environ:
    time.sleep(600)
"""
PROBES = ("tracepoint:syscalls:sys_enter_clone", "tracepoint:syscalls:sys_enter_clone3")


@pytest.mark.needs("bpftrace")
def test_every_thread_that_a_rank_starts_is_a_line_and_a_count_and_no_other_process_is_seen(ranks):
    job = ranks(2)
    began = time.time()
    job.under(Bpf(probes=PROBES))
    job.run(PROGRAM)
    assert job.wait() == [0, 0]
    recorded = job.stop()
    assert not recorded.problems and len(recorded.files) == 2
    for rank, child in enumerate(job.children):
        lines = (job.rank(rank) / "bpf.txt").read_text().splitlines()
        events = [line.split() for line in lines if not line.startswith("@")]
        assert len(events) == 5 and {int(event[1]) for event in events} == {child.pid}
        assert all(began < float(event[0]) < time.time() + 0.1 for event in events)
        (count,) = [line for line in lines if line.startswith("@")]
        assert count in (f"@calls[{probe}]: 5" for probe in PROBES)


@pytest.mark.needs("bpftrace")
def test_a_stopped_rank_keeps_nobody_waiting_and_a_wrong_probe_is_said(ranks):
    job = ranks(1)
    job.under(Bpf(probes=("tracepoint:syscalls:nosuch",)))
    job.run(PROGRAM, {"STAY": "1"})
    job.until(job.says(0, "ready"), "ready")
    job.children[0].send_signal(signal.SIGSTOP)
    recorded = job.stop()
    assert "rank 0: bpftrace did not attach" in recorded.problems[0]


def test_a_probe_that_carries_a_program_is_refused():
    with pytest.raises(UsageError, match="to record"):
        Bpf(probes=('tracepoint:a:b { system("x") }',))
    with pytest.raises(UsageError, match="nothing to record"):
        Bpf(probes=())
