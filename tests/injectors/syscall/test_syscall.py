"""System calls as the victim gets them back; which call, which path, which rank; by tracer and by filter."""

from __future__ import annotations

import os
import signal

import pytest

from dtprobe import catalog
from dtprobe.clock import SystemClock
from dtprobe.confine import Confinement
from dtprobe.errors import Unavailable
from dtprobe.inject import Site
from dtprobe.inject.spec import parse
from dtprobe.probes import Where
from dtprobe.probes.strace import Strace

KNOWN = catalog.injectors()[0]
traced = pytest.mark.needs("strace")

TOUCH = """
import errno
(shared / f"file-{rank}").write_text("x" * 100)
def touch(name=f"file-{rank}"):
    try:
        with open(shared / name, "rb", buffering=0) as file:
            return len(file.read(10))
    except OSError as error:
        return errno.errorcode[error.errno]
"""
EIGHT = TOUCH + "say(*(touch() for _ in range(8)))"


def path(job, rank):
    return str(job.shared / f"file-{rank}")


@traced
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(
    ("aim", "expected", "numbers"),
    [
        ("nth=4", "10 10 EIO 10 10 10 10 10", [4]),
        ("nth=3+5+7", "10 EIO 10 EIO 10 EIO 10 10", [3, 5, 7]),
        ("every=3,times=2", "10 EIO 10 10 EIO 10 10 10", [3, 6]),
    ],
)
def test_the_calls_that_are_meant_fail_on_that_path_and_rank(job, local, aim, expected, numbers):
    """The first call on the path is the write that makes the file."""
    text = f"syscall:error,rank=1,call=openat,error=EIO,path={path(job, 1)},{aim}"
    if local:
        job.run_local(text, EIGHT)
    else:
        job.run(text, job.command(EIGHT))
    assert (job.said(0), job.said(1)) == (["10 10 10 10 10 10 10 10"], [expected])
    assert job.where() == [(1, number) for number in numbers]
    assert {one.call for one in job.fired()} == {"openat"}


@traced
def test_what_fired_is_repeated_call_for_call(job):
    first = parse(f"syscall:error,rank=1,call=openat,path={path(job, 1)},every=2", KNOWN)
    job.run(str(first), job.command(EIGHT))
    fired = [one.nth for one in job.fired()]
    again = first.at(sorted(set(fired)), 1)
    (job.shared / "said-1").unlink()
    job.run(str(again), job.command(EIGHT))
    assert [one.nth for one in job.fired()] == fired == [2, 4, 6, 8]


@traced
def test_a_call_returns_what_it_never_did(job):
    code = (
        TOUCH
        + """
fd = os.open(shared / f"lost-{rank}", os.O_CREAT | os.O_WRONLY)
say(os.write(fd, b"x" * 5), os.fstat(fd).st_size)
"""
    )
    job.run(f"syscall:retval,rank=1,call=write,value=5,path={job.shared / 'lost-1'}", job.command(code))
    assert (job.said(0), job.said(1)) == (["5 5"], ["5 0"]) and job.where() == [(1, 1)]


@traced
def test_a_call_comes_late(job):
    code = """
took = []
for _ in range(3):
    before = time.monotonic()
    (shared / f"slow-{rank}").open("w").close()
    took.append(time.monotonic() - before)
say(took[1] >= 1 and took[1] > took[0] + 0.5 and took[1] > took[2] + 0.5)
"""
    job.run(f"syscall:delay,rank=1,call=openat,seconds=1,nth=2,path={job.shared / 'slow-1'}", job.command(code))
    assert job.said(1) == ["True"] and job.where() == [(1, 2)]


@traced
def test_a_signal_hits_a_call(job):
    code = (
        TOUCH
        + """
import signal
signal.signal(signal.SIGUSR1, lambda *_: say("hit"))
for number in range(4):
    say(touch())
"""
    )
    job.run(f"syscall:signal,rank=1,call=openat,signal=SIGUSR1,nth=3,path={path(job, 1)}", job.command(code))
    assert sorted(job.said(1)) == ["10"] * 4 + ["hit"] and job.said(1)[0] == "10"
    assert job.where() == [(1, 3)] and job.said(0) == ["10"] * 4


@traced
def test_without_a_rank_the_whole_command_is_traced(job):
    job.run(f"syscall:error,call=openat,error=ENOSPC,path={job.shared / 'file-1'},nth=2", job.command(EIGHT))
    assert job.said(1) == ["ENOSPC 10 10 10 10 10 10 10"] and job.where() == [(1, 2)]


@traced
@pytest.mark.needs("ptrace")
def test_a_rank_without_python_is_attached_to_and_the_cost_is_said(job):
    loop = ["bash", "-c", f"for i in $(seq 1000); do : <{job.shared}/there || exit 5; [ $RANK = 0 ] && exit; sleep 0.02; done"]
    (job.shared / "there").touch()
    job.run(f"syscall:error,rank=1,call=openat,path={job.shared}/there,nth=2", job.launching(*loop))
    assert (job.exit_of(0), job.exit_of(1)) == (0, 5)
    assert job.where() == [(1, 2)] and "33 to 63 us" in job.fired()[0].detail


@traced
@pytest.mark.needs("ptrace")
def test_a_fault_comes_later_and_goes_again(job):
    code = (
        TOUCH
        + """
if rank == 1:
    say(touch())
    until(lambda: touch() == "EIO")
    say("EIO")
    until(lambda: touch() == 10)
    say(10)
"""
    )
    job.run(f"syscall:error,rank=1,call=openat,path={path(job, 1)},after_s=1,for_s=1", job.command(code))
    assert job.said(1) == ["10", "EIO", "10"] and len(job.fired()) >= 1


def test_a_filter_lets_chosen_calls_fail_without_a_tracer(job):
    code = """
import errno
tracer = [line.split()[1] for line in open("/proc/self/status") if line.startswith("TracerPid")]
try:
    os.fsync(os.open(shared / f"synced-{rank}", os.O_CREAT | os.O_WRONLY))
    say("synced", *tracer)
except OSError as error:
    say(errno.errorcode[error.errno], *tracer)
time.sleep(0.2)
"""
    job.run("syscall:errno,rank=1,call=fsync+fdatasync,error=EIO", job.command(code))
    assert (job.said(0), job.said(1)) == (["synced 0"], ["EIO 0"]) and job.where() == [(1, None)]


def test_a_filter_under_our_own_launcher_and_two_of_them(job):
    code = """
import errno
def fails(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
say(fails(os.sync) or "synced", fails(os.mkdir, shared / f"made-{rank}"))
time.sleep(0.2)
"""
    job.run_local(["syscall:errno,rank=1,call=mkdir,error=EDQUOT", "syscall:errno,rank=1,call=mknod"], code)
    assert (job.said(0), job.said(1)) == (["synced None"], ["synced EDQUOT"])
    assert (job.where(0), job.where(1)) == ([(1, None)], [(1, None)])


@traced
def test_a_victim_that_dies_first(job):
    job.run_local(f"syscall:error,rank=1,call=openat,path={path(job, 1)},nth=2", TOUCH + "os.kill(os.getpid(), 9)")
    assert job.where() == [] and job.record.exits[1].signal == signal.SIGKILL


@traced
def test_why_a_fault_never_fired_is_said(job):
    job.run(f"syscall:error,rank=1,call=openat,path={path(job, 1)},nth=20", job.command(EIGHT))
    assert job.where() == [] and "rank1: no thread made more than 9 of these calls" in job.problems()


@traced
def test_a_killed_harness_leaves_no_tracer(job, killed):
    argv = job.command("say('up')\nuntil(lambda: False)")
    killed([f"syscall:error,rank=1,call=openat,path={path(job, 1)}", "--", *argv], lambda: job.said(1))


@traced
def test_the_recorder_steps_aside_for_a_fault_and_says_so(tmp_path):
    where = Where(
        folder=tmp_path, scratch=tmp_path, world_size=2, processes=lambda: (), suspect=lambda reason: None, environ={}
    )
    recorder = Strace().recorder(where)
    assert recorder.wrap(1, ("strace", "-D", "--", "true")) == ("strace", "-D", "--", "true")
    assert "rank 1 is traced by a fault" in "; ".join(recorder.stop().problems)


@traced
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("syscall:error,call=opennat", "opennat"),
        ("syscall:error,call=openat,nth=1+2+5", "equal distances"),
        ("syscall:errno,call=nonsense", "no system call nonsense"),
        ("syscall:errno,call=read,nth=2", "use syscall:error"),
    ],
)
def test_what_cannot_reach_the_kernel_is_refused_and_nothing_is_started(job, fault, words):
    assert words in job.refused(fault)


@traced
def test_two_tracers_on_one_rank_are_refused_and_nothing_is_started(job):
    assert "one tracer" in job.refused("syscall:error,rank=1,call=openat", "syscall:delay,rank=0+1,call=read,seconds=1")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("syscall:error,call=openat,error=EWRONG", "no name as in errno"),
        ("syscall:error,call=open at", "no name of a system call"),
        ("syscall:error", "needs call"),
        ("syscall:retval,call=read,value=-1", "syscall:error is for"),
        ("syscall:signal,call=read,signal=SIGWRONG", "no name as in signal"),
        ("syscall:delay,call=read,seconds=0", "between 0 and 3600"),
        ("syscall:error,call=read,probability=0.5", "cannot aim by probability"),
    ],
)
def test_what_cannot_be_is_one_line(fault, words):
    with pytest.raises(catalog.UsageError) as told:
        parse(fault, KNOWN)
    assert words in str(told.value)


def test_where_something_is_missing_the_reason_is_exact(monkeypatch, job):
    make = KNOWN["syscall"].make
    with Confinement.open(f"test-missing-{os.getpid()}", environ=job.environ) as box:
        site = Site(
            folder=job.shared,
            scratch=box.scratch,
            box=box,
            world_size=2,
            seed=0,
            index=0,
            clock=SystemClock(),
            processes=lambda: (),
        )
        monkeypatch.setattr(make.__globals__["filtered"], "LIBRARY", "libnothing.so.9")
        told = make(parse("syscall:errno,call=read", KNOWN), site).check()
        assert (told.reason, told.remedy) == ("libnothing.so.9 is not installed", "apt-get install libseccomp2")
        lacks = Unavailable("strace is not installed", "apt-get install strace")
        monkeypatch.setattr(make.__globals__["doctor"], "capability", lambda name: lacks)
        assert make(parse("syscall:error,call=read", KNOWN), site).check() == lacks
