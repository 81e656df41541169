from __future__ import annotations

import json
import signal

import pytest

from dtprobe.probes.flight_recorder import FlightRecorder

pytestmark = pytest.mark.needs("gloo", "torch>=2.10")

START = """
import os, sys, time, datetime
import torch
import torch.distributed as dist
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
timeout = datetime.timedelta(seconds=float(os.environ.get("TIMEOUT_S", "60")))
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=world, timeout=timeout)
x = torch.ones(4)
for _ in range(3):
    dist.all_reduce(x)
print("ready", flush=True)
"""
SKIPPED = (
    START
    + """
if rank == 1:
    time.sleep(600)
dist.all_reduce(x)
"""
)
HEALTHY = (
    START
    + """
deadline = time.monotonic() + 3
while time.monotonic() < deadline:
    sum(range(1000))
for _ in range(3):
    dist.all_reduce(x)
dist.destroy_process_group()
"""
)


def dumps(job, rank):
    """The flight recorder files of a rank, oldest first."""
    files = sorted(job.rank(rank).glob("fr-*.json"), key=lambda path: int(path.stem.removeprefix("fr-")))
    return [json.loads(file.read_text()) for file in files]


def test_a_skipped_collective_is_suspected_once_and_the_rank_that_is_behind_named(ranks):
    job = ranks(2)
    job.under(FlightRecorder(interval_s=0.1, suspect_s=0.6))
    job.run(SKIPPED)
    job.until(lambda: job.suspected, "a suspicion")
    recorded = job.stop()
    (reason,) = job.suspected
    assert reason.startswith("gloo:all_reduce [[4]] (seq 4 of default_pg) open for")
    assert "on rank 0; rank 1 is behind: last called gloo:all_reduce [[4]] (seq 3 of default_pg), state S" in reason
    at_suspicion = dumps(job, 0)[0]["entries"]
    assert [(entry["collective_seq_id"], entry["retired"]) for entry in at_suspicion][-1] == (4, False)
    assert [entry["collective_seq_id"] for entry in dumps(job, 1)[0]["entries"]] == [1, 2, 3]
    assert set(recorded.files) == {path for rank in (0, 1) for path in job.rank(rank).glob("fr-*.json")}
    assert not recorded.problems


def test_long_compute_is_no_hang_and_the_ranks_leave_their_records_at_their_end_in_silence(ranks):
    job = ranks(2)
    job.under(FlightRecorder(interval_s=0.1, suspect_s=1))
    job.run(HEALTHY)
    assert job.wait() == [0, 0]
    recorded = job.stop()
    assert not job.suspected and not recorded.problems
    for rank in (0, 1):
        assert [entry["collective_seq_id"] for entry in dumps(job, rank)[-1]["entries"]] == [1, 2, 3, 4, 5, 6]
        assert "frames" not in dumps(job, rank)[-1]["entries"][0]
        assert "WorkerServer" not in (job.rank(rank) / "stderr.log").read_text()
        assert (job.rank(rank) / "stdout.log").read_text() == "ready\n"
    assert not list(job.scratch.glob("*.sock"))


def test_a_stopped_rank_is_named_with_its_state_from_what_it_last_said(ranks):
    job = ranks(2)
    job.under(FlightRecorder(interval_s=0.1, suspect_s=0.6))
    loop = START + "while True:\n    dist.all_reduce(x)\n    time.sleep(0.01)\n"
    job.run(loop)
    for rank in (0, 1):
        job.until(job.says(rank, "ready"), "ready")
    job.until(lambda: any(known.text for known in job.recorders[0]._ranks.values()), "an answer")
    job.children[1].send_signal(signal.SIGSTOP)
    job.until(lambda: job.suspected, "a suspicion")
    assert "rank 1" in job.suspected[0] and "is stopped (state T, in do_signal_stop)" in job.suspected[0]
    job.stop()
    assert dumps(job, 0) and dumps(job, 1)


def test_the_records_from_before_the_timeout_are_kept_when_it_comes_before_the_suspicion(ranks):
    job = ranks(2)
    job.under(FlightRecorder(interval_s=0.1, suspect_s=60))
    job.run(SKIPPED, {"TIMEOUT_S": "4"})
    job.until(lambda: job.children[0].poll() is not None, "the timeout")
    job.stop()
    assert len(job.suspected) == 1, "half of the collective's own timeout counts as well"
    retired = [[entry["retired"] for entry in dump["entries"] if entry["collective_seq_id"] == 4] for dump in dumps(job, 0)]
    assert retired[0] == [False] and retired[-1] == [True]


def test_all_ranks_inside_and_none_leaving_is_said_so(ranks):
    job = ranks(3)
    job.under(FlightRecorder(interval_s=0.1, suspect_s=0.6))
    job.run(
        START
        + """
group = dist.new_group([0, 1])
if rank == 0: dist.all_reduce(x, group=group)
if rank == 1: dist.broadcast(x[:2], src=0, group=group)
time.sleep(600)
"""
    )
    job.until(lambda: job.suspected, "a suspicion")
    assert "gloo:all_reduce [[4]]" in job.suspected[0] or "gloo:broadcast [[2]]" in job.suspected[0]
    assert " called gloo:" in job.suspected[0] and "rank 2" not in job.suspected[0]


def test_a_rank_killed_before_it_ends_leaves_what_was_last_known(ranks):
    job = ranks(1)
    job.under(FlightRecorder(interval_s=0.1))
    job.run(START + "time.sleep(600)")
    known = job.recorders[0]._ranks
    job.until(lambda: 0 in known and b'"collective_seq_id":3' in known[0].text.get("fr_trace_json", b""), "all three")
    job.children[0].kill()
    job.children[0].wait()
    job.stop()
    assert [entry["collective_seq_id"] for entry in dumps(job, 0)[-1]["entries"]] == [1, 2, 3]


def test_a_scratch_folder_too_deep_for_a_socket_leaves_the_records_at_exit_and_says_so(ranks):
    job = ranks(1)
    job.scratch = job.scratch / ("deep" * 30)
    job.scratch.mkdir()
    job.under(FlightRecorder())
    job.run(START)
    assert job.wait() == [0]
    recorded = job.stop()
    assert len(dumps(job, 0)) == 1
    assert "too long a path for a socket" in recorded.problems[0]


def test_a_worker_without_torch_is_a_fact_not_a_problem(ranks):
    job = ranks(1)
    job.under(FlightRecorder())
    job.run("print('no torch here')")
    assert job.wait() == [0]
    recorded = job.stop()
    assert not recorded.files and not recorded.problems
    assert "torch.distributed was not imported" in recorded.facts["rank 0"]


def test_a_forked_child_ends_by_itself_and_leaves_the_rank_its_server(ranks):
    job = ranks(1)
    job.under(FlightRecorder(interval_s=0.1))
    # Before the process group: after it a forked child hangs in gloo's own destructor, recorder or not.
    job.run(
        """
import os, sys, time
import torch.distributed
pid = os.fork()
if pid == 0:
    sys.exit(7)
print("child ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
time.sleep(600)
"""
    )
    job.until(job.says(0, "child ended with 7"), "the child's end")
    looks = job.recorders[0]._sampler.looks
    job.until(lambda: job.recorders[0]._sampler.looks > looks + 1, "another look")
    assert job.recorders[0]._ranks[0].handlers and job.recorders[0]._ranks[0].silent == ""
    assert [path.name for path in job.scratch.iterdir()] == [f"fr-{job.children[0].pid}.sock"]


def test_ranks_that_ended_inside_a_collective_are_no_longer_waiting_in_it(ranks):
    job = ranks(2)
    job.under(FlightRecorder(interval_s=0.1, suspect_s=1.5))
    job.run(SKIPPED)
    recorder = job.recorders[0]
    job.until(
        lambda: 0 in recorder._ranks and b'"retired":false' in recorder._ranks[0].text.get("fr_trace_json", b""), "it waits"
    )
    for child in job.children:
        child.kill()
        child.wait()
    asked = recorder._clock.monotonic()
    job.until(lambda: recorder._clock.monotonic() > asked + 2, "longer than a suspicion takes")
    assert not job.suspected
