"""Each fault of a process, seen by its victim; who else is left alone; what is undone; what is refused."""

from __future__ import annotations

import json
import signal

import psutil
import pytest

from dtprobe import catalog
from dtprobe.inject.spec import parse

KNOWN = catalog.injectors()[0]
VICTIM_IS_1 = "until(lambda: ended(1)) if rank == 0 else until(lambda: False)"


@pytest.mark.parametrize(
    "text",
    [
        "process:kill,rank=1,after_s=4",
        "process:stop,rank=1,after_s=5",
        "process:stop,rank=0+1,after_s=0.5,for_s=2",
        "process:exit,code=3,clean=yes",
        "process:exception,type=KeyError,op=all_reduce,nth=3",
    ],
)
def test_the_grammar_of_the_design_is_understood(text):
    fault = parse(text, KNOWN, world_size=2)
    assert parse(str(fault), KNOWN) == fault


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ("kill", -signal.SIGKILL),
        ("term", -signal.SIGTERM),
        ("int", -signal.SIGINT),
        ("abort", -signal.SIGABRT),
        ("segfault", -signal.SIGSEGV),
        ("exit,code=7", 7),
        ("exit0", 0),
    ],
)
def test_the_rank_that_is_meant_ends_so_and_the_other_goes_on(job, action, code):
    name, _, more = action.partition(",")
    job.run(f"process:{name},rank=1,after_s=0.2{',' * bool(more)}{more}", job.command(VICTIM_IS_1))
    assert (job.exit_of(0), job.exit_of(1)) == (0, code)
    assert job.where() == [(1, None)]


def test_under_our_own_launcher_the_time_counts_from_the_program_s_start(job):
    code = "say(time.time_ns())\nuntil(lambda: False)"
    record = job.run_local("process:kill,rank=0+1,after_s=0.5", code)
    assert [one.signal for one in record.exits] == [signal.SIGKILL] * 2
    for one in job.fired():
        assert one.t_ns >= int(job.said(one.rank)[0]) + 0.3e9


def test_a_stopped_rank_stands_still_and_goes_on_after_its_time(job):
    code = """
if rank == 1:
    for _ in range(1000):
        before = time.monotonic()
        time.sleep(0.01)
        if time.monotonic() - before > 0.8:
            say("stood still")
            break
else:
    until(lambda: ended(1))
"""
    job.run("process:stop,rank=1,after_s=1.5,for_s=1", job.command(code))
    assert job.said(1) == ["stood still"] and (job.exit_of(0), job.exit_of(1)) == (0, 0)
    (one,) = job.fired()
    assert one.rank == 1 and one.ended_ns - one.t_ns > 0.9e9


def test_a_rank_that_is_stopped_until_the_end_is_continued_and_ended(job):
    record = job.run("process:stop,rank=1", job.command("until(lambda: False)"), timeout_s=3)
    assert record.timed_out
    (one,) = job.fired()
    assert one.rank == 1 and one.ended_ns is not None
    assert not job.processes()


def test_a_victim_that_dies_while_it_is_stopped_is_said(job):
    code = """
import signal
if rank == 0:
    pid = int((shared / "pid-1").read_text())
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    os.kill(pid, signal.SIGKILL)
    until(lambda: ended(1))
until(lambda: rank == 0)
"""
    job.run("process:stop,rank=1", job.command(code))
    (one,) = job.fired()
    assert job.exit_of(1) == -signal.SIGKILL and "ended while it was stopped" in one.detail


def test_a_rank_that_ends_before_its_time_is_no_firing(job):
    job.run("process:kill,rank=1,after_s=30", job.command("time.sleep(1)"))
    assert job.fired() == () and job.exit_of(1) == 0
    assert "rank 1 ran for " in job.problems() and "ended before after_s=30" in job.problems()


def test_a_rank_that_never_comes_is_said(job):
    job.run("process:kill,rank=5", job.command("pass"))
    assert job.fired() == () and "no rank 5 was seen" in job.problems()


def test_a_killed_harness_leaves_no_stopped_rank(job, killed):
    def stopped():
        return [one for one in job.processes() if one.info["status"] == psutil.STATUS_STOPPED]

    killed(["process:stop,rank=1", "--", *job.command("until(lambda: False)")], stopped)


def test_ranks_without_python_are_found_by_their_environment(job):
    job.run("process:kill,rank=1", job.launching("sleep", "2"))
    assert (job.exit_of(0), job.exit_of(1)) == (0, -signal.SIGKILL)
    assert job.where() == [(1, None)]


def test_a_command_without_ranks_is_the_target_itself(job):
    record = job.run("process:term,after_s=0.1", ["sleep", "60"])
    assert record.exits[0].signal == signal.SIGTERM
    assert job.where() == [(None, None)] and "the command" in job.fired()[0].detail


def test_while_the_gil_is_held_no_python_thread_runs(job):
    code = """
import threading
gaps = []
def tick():
    while True:
        before = time.monotonic()
        time.sleep(0.01)
        gaps.append(time.monotonic() - before)
threading.Thread(target=tick, daemon=True).start()
if rank == 1:
    until(lambda: max(gaps, default=0) > 0.9)
    say("held")
    until(lambda: "ended" in (Path(os.environ["DTPROBE_FOLDER"]) / "rank1" / "injected.jsonl").read_text())
else:
    until(lambda: ended(1))
"""
    job.run("process:gil,rank=1,after_s=1.5,seconds=1", job.command(code))
    assert job.said(1) == ["held"]
    (one,) = job.fired()
    assert one.rank == 1 and one.ended_ns - one.t_ns >= 1e9


def test_an_exception_from_elsewhere_arrives_in_the_main_thread(job):
    code = """
try:
    until(lambda: ended(1))
except KeyError as error:
    say(type(error).__name__, error)
"""
    job.run("process:exception,rank=1,type=KeyError,after_s=1", job.command(code))
    assert job.said(1) == ["KeyError 'injected: process:exception,rank=1,after_s=1,type=KeyError'"]
    assert job.said(0) == [] and job.where() == [(1, None)]


def test_a_clean_exit_runs_finally(job):
    code = """
try:
    until(lambda: ended(1))
finally:
    say("finally")
"""
    job.run("process:exit,rank=1,code=3,clean=yes,after_s=1", job.command(code))
    assert job.exit_of(1) == 3 and job.said(1) == ["finally"]


def test_a_forked_child_outlives_the_rank_with_its_pipe_and_is_ended_with_the_run(job):
    code = """
if rank == 1:
    until(lambda: "fired" in (Path(os.environ["DTPROBE_FOLDER"]) / "rank1" / "injected.jsonl").read_text())
    time.sleep(0.2)
else:
    until(lambda: ended(1))
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    here = f"DTPROBE_FOLDER={os.environ['DTPROBE_FOLDER']}".encode()  # of this job, not of a test beside it
    def mine(pid):
        try:
            told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\\0")
            return {b"RANK=1", here} <= set(told) and os.readlink(f"/proc/{pid}/fd/1")
        except OSError:
            return None
    say([link for pid in pids if (link := mine(pid))])
"""
    job.run("process:fork,rank=1,seconds=300", job.command(code))
    (line,) = job.said(0)
    assert "launcher/stdout.log" in line and job.where() == [(1, None)]
    assert not job.processes()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("process:kil,rank=1", "did you mean kill"),
        ("process:exit,code=256", "not between 0 and 255"),
        ("process:exit", "needs code"),
        ("process:gil,seconds=0", "between 0 and 3600"),
        ("process:exception,type=Nothing", "no built-in exception"),
        ("process:kill,node=1", "cannot aim by node"),
        ("process:kill,rank=2", "outside world size 2"),
    ],
)
def test_what_cannot_be_is_one_line(fault, words):
    with pytest.raises(catalog.UsageError) as told:
        parse(fault, KNOWN, world_size=2)
    assert words in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("process:kil,rank=1", "did you mean kill"), ("process:kill,for_s=2", "leave for_s out")],
)
def test_bad_input_ends_with_2_and_nothing_is_started(job, fault, words):
    assert words in job.refused(fault)


def test_by_command_line_a_whole_run_says_what_fired(job):
    process = job.cli("process:kill,rank=1,after_s=0.1", "--", *job.command(VICTIM_IS_1))
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    (fault,) = json.loads(out)["faults"]
    assert fault["count"] == 1 and fault["fired"][0]["rank"] == 1
