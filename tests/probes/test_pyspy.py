from __future__ import annotations

import json
import signal
import time

import pytest

from dtprobe.probes.procfs import condition
from dtprobe.probes.pyspy import PySpy

PROGRAM = """
import time
def waits_for_nobody():
    print("ready", flush=True)
    time.sleep(600)
waits_for_nobody()
"""
pytestmark = pytest.mark.needs("pyspy")


def test_a_suspicion_takes_the_stacks_of_every_rank_and_counts_the_time_they_stood(ranks):
    job = ranks(2)
    recorder = job.under(PySpy(on_suspicion=1))
    job.run(PROGRAM)
    for rank in (0, 1):
        job.until(job.says(rank, "ready"), "ready")
    recorder.suspected("the test says so")
    recorder.suspected("once more, which is over the limit")
    recorded = job.stop()
    assert recorded.files == (job.rank(0) / "pyspy-0.json", job.rank(1) / "pyspy-0.json")
    for rank, child in enumerate(job.children):
        (thread,) = json.loads((job.rank(rank) / "pyspy-0.json").read_text())
        assert thread["pid"] == child.pid
        assert "waits_for_nobody" in [frame["name"] for frame in thread["frames"]]
        job.until(lambda child=child: condition(child.pid).state == "S", "it sleeps on")
    assert recorded.stopped_s > 0 and recorded.facts["suspicions"] == "2"


def test_a_stopped_rank_is_reported_with_its_state_and_stays_stopped(ranks):
    job = ranks(2)
    recorder = job.under(PySpy())
    job.run(PROGRAM)
    for rank in (0, 1):
        job.until(job.says(rank, "ready"), "ready")
    job.children[1].send_signal(signal.SIGSTOP)
    job.until(lambda: condition(job.children[1].pid).stopped, "state T")
    recorder.suspected("the test says so")
    recorded = job.stop()
    assert recorded.files == (job.rank(0) / "pyspy-0.json",)
    (problem,) = recorded.problems
    assert problem.startswith("rank 1 is stopped (state T") and "py-spy cannot read it" in problem
    assert condition(job.children[1].pid).stopped


def test_a_dead_rank_is_said_and_the_living_are_read(ranks):
    job = ranks(2)
    recorder = job.under(PySpy())
    job.run(PROGRAM)
    for rank in (0, 1):
        job.until(job.says(rank, "ready"), "ready")
    job.children[0].kill()
    job.until(lambda: condition(job.children[0].pid).ended, "the end")
    recorder.suspected("the test says so")
    recorded = job.stop()
    assert recorded.problems == ("rank 0 has ended: no stacks",)
    assert recorded.files == (job.rank(1) / "pyspy-0.json",)


def test_on_a_schedule_stacks_come_without_any_suspicion(ranks):
    job = ranks(1)
    job.under(PySpy(every_s=0.1))
    job.run(PROGRAM)
    job.until(job.says(0, "ready"), "ready")
    job.until((job.rank(0) / "pyspy-0.json").exists, "a dump")
    began = time.monotonic()
    recorded = job.stop()
    assert time.monotonic() - began < 5
    assert recorded.files[0] == job.rank(0) / "pyspy-0.json"
