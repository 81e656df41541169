"""Faults of a process at a counted collective: before that call, on that rank, and again at the same call."""

from __future__ import annotations

import json
import signal

import pytest

pytestmark = pytest.mark.needs("gloo")

WORK = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{shared}/store-{STEPS}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
try:
    for step in range(1, STEPS + 1):
        dist.all_reduce(torch.ones(2))
        say(step)
        dist.barrier()
except Exception as error:
    say(type(error).__name__)
else:
    dist.destroy_process_group()
"""


def work(steps):
    return f"STEPS = {steps}\nos.environ['GLOO_SOCKET_IFNAME'] = 'lo'\n" + WORK


def test_a_rank_is_killed_before_the_collective_that_is_meant(job):
    job.run("process:kill,rank=1,op=all_reduce,nth=3", job.command(work(5)))
    assert job.exit_of(1) == -signal.SIGKILL and job.said(1) == ["1", "2"] and job.said(0)[:2] == ["1", "2"]
    (one,) = job.fired()
    assert (one.rank, one.call, one.nth) == (1, "all_reduce", 3)


def test_an_exception_comes_at_a_barrier_only(job):
    job.run("process:exception,rank=0,type=OverflowError,op=barrier,nth=2", job.command(work(3)))
    assert job.said(0) == ["1", "2", "OverflowError"] and [(one.call, one.nth) for one in job.fired()] == [("barrier", 2)]


def test_a_rank_that_stops_itself_at_a_collective_is_let_go_after_its_time(job):
    code = work(3).replace("say(step)", "say(step, time.monotonic())")
    job.run("process:stop,rank=1,op=all_reduce,nth=2,for_s=1.5", job.command(code))
    assert (job.exit_of(0), job.exit_of(1)) == (0, 0)
    first, second, _ = (float(line.split()[1]) for line in job.said(0))
    assert second - first >= 1.4, "the other rank waited for it"
    (one,) = job.fired()
    assert one.rank == 1 and one.nth == 2 and one.ended_ns - one.t_ns >= 1.5e9


def test_a_rank_that_is_started_anew_is_not_hit_again(job):
    """An elastic launcher would else never get past the fault."""
    again = """
import os, subprocess, sys
for attempt in range(3):
    ranks = [subprocess.Popen(sys.argv[1:], env=os.environ | {"RANK": str(k), "STORE": str(attempt)}) for k in (0, 1)]
    codes = [rank.wait() for rank in ranks]
    if codes == [0, 0]:
        sys.exit(attempt)
sys.exit(9)
"""
    (job.shared / "again.py").write_text(again)
    ranks = job.command(
        work(2).replace("store-{STEPS}", "store-{os.environ['STORE']}").replace("say(type(error).__name__)", "sys.exit(1)")
    )[-2:]
    record = job.run("process:kill,rank=1,op=all_reduce", [ranks[0], str(job.shared / "again.py"), *ranks])
    assert record.exits[0].exit_code == 1, "the second attempt came through"
    assert job.where() == [(1, 1)]


def test_chance_is_seeded_and_a_replay_fires_at_the_very_calls(job):
    def fired(*words):
        for old in [*job.shared.glob("store-*"), *job.shared.glob("said-*")]:
            old.unlink()
        process = job.cli(*words, "--", *job.command(work(8)))
        out, err = process.communicate(timeout=120)
        assert out, err
        return sorted((one["rank"], one["nth"]) for fault in json.loads(out)["faults"] for one in fault["fired"])

    first = fired("process:gil,op=all_reduce,probability=0.4,seconds=0.01", "--seed", "5")
    assert {rank for rank, _ in first} == {0, 1} and 2 <= len(first) < 16
    (run,) = (job.shared / "runs" / "inject").iterdir()
    assert fired("--replay", str(run)) == first


def test_why_a_fault_never_fired_is_said(job):
    job.run("process:kill,rank=1,op=all_reduce,nth=50", job.command(work(2)))
    assert job.where() == [] and "2 all_reduce calls came, which nth=50 did not meet" in job.problems()


def test_a_collective_that_does_not_exist_is_refused_and_nothing_is_started(job):
    assert "all_reduce" in job.refused("process:kill,rank=1,op=all_reduec,nth=2")
