"""Wall clocks as the victim reads them, by every way that Python and C read them; waits that still last as long as they should."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from dtprobe import catalog
from dtprobe.inject.spec import parse

pytestmark = pytest.mark.needs("cc")
KNOWN = catalog.injectors()[0]
OFF = "def off(): return time.time() - time.monotonic()\n"
WALL = "say(round(time.time() - float(os.environ['NOW']), -2))\n"


@pytest.fixture
def now(job):
    job.extra = {"NOW": str(time.time())}


@pytest.mark.parametrize("local", [False, True])
def test_only_the_rank_that_is_meant_is_wrong_from_the_start(job, now, local):
    text = "clock:skew,rank=1,seconds=-86400"
    if local:
        job.run_local(text, WALL + "time.sleep(0.5)")
    else:
        job.run(text, job.command(WALL + "time.sleep(0.5)"))
    assert (job.said(0), job.said(1)) == (["0.0"], ["-86400.0"])
    assert job.where() == [(1, None)]


def test_without_a_rank_the_whole_command_is_wrong(job, now):
    code = "import os, time; print(round(time.time() - float(os.environ['NOW']), -2), flush=True); time.sleep(0.5)"
    job.run("clock:skew,seconds=3600", [sys.executable, "-I", "-c", code])
    assert job.log("launcher/stdout.log") == "3600.0\n" and job.where() == [(None, None)]


def test_a_clock_jumps_while_the_rank_runs_and_comes_back(job):
    code = (
        OFF
        + """
first = off()
if rank == 1:
    until(lambda: abs(off() - first - 500) < 1)
    say("forward")
    until(lambda: abs(off() - first) < 1)
    say("back")
else:
    until(lambda: ended(1))
    say(round(off() - first))
"""
    )
    job.run("clock:jump,rank=1,after_s=3,seconds=500,for_s=2", job.command(code))
    assert (job.said(0), job.said(1)) == (["0"], ["forward", "back"])
    (one,) = job.fired()
    assert one.rank == 1 and one.ended_ns - one.t_ns >= 2e9


def test_two_faults_on_one_rank_add_up(job, now):
    job.run(["clock:skew,rank=0,seconds=1000", "clock:skew,rank=0+1,seconds=200"], job.command(WALL + "time.sleep(0.5)"))
    assert (job.said(0), job.said(1)) == (["1200.0"], ["200.0"])
    assert (job.where(0), sorted(job.where(1))) == ([(0, None)], [(0, None), (1, None)])


@pytest.mark.parametrize("fault", ["process:kill", "process:exit0"])
@pytest.mark.parametrize("seconds", [100000, -100000])
def test_other_faults_keep_the_right_time_on_a_rank_whose_clock_is_wrong(job, seconds, fault):
    code = "say(time.time_ns())\nuntil(lambda: ended(1))"
    job.run([f"clock:skew,rank=1,seconds={seconds}", f"{fault},rank=1,after_s=1"], job.command(code))
    ((fired,), (shifted,)) = job.fired(1), job.fired(0)
    began_ns = int(job.said(1)[0]) - seconds * 10**9
    assert fired.t_ns - began_ns >= 0.5e9 and 0 < fired.t_ns - shifted.t_ns < 80e9


@pytest.mark.parametrize("seconds", [100000, -100000])
def test_waits_last_as_long_as_they_are_asked_to(job, seconds):
    """Under libfaketime some of these fail or never end."""
    code = """
import concurrent.futures, queue, select, threading
def lasts(wait, asked):
    before = time.monotonic()
    wait()
    took = time.monotonic() - before
    return asked * 0.95 <= took < asked + 20
def got_nothing():
    try:
        queue.Queue().get(timeout=0.2)
    except queue.Empty:
        pass
held = threading.Lock(); held.acquire()
lines = threading.Condition()
def condition():
    with lines:
        lines.wait(0.2)
say([lasts(lambda: time.sleep(0.2), 0.2), lasts(lambda: threading.Event().wait(0.2), 0.2), lasts(got_nothing, 0.2),
     lasts(lambda: held.acquire(timeout=0.2), 0.2), lasts(condition, 0.2), lasts(lambda: select.select([], [], [], 0.2), 0.2)])
"""
    job.run(f"clock:skew,rank=1,seconds={seconds}", job.command(code))
    assert job.said(1) == [str([True] * 6)]


C = r"""
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static double mono(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }
static struct timespec soon(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    t.tv_nsec += 200000000;
    if (t.tv_nsec >= 1000000000) t.tv_sec++, t.tv_nsec -= 1000000000;
    return t;
}
static int lasted(double since) { double took = mono() - since; return took > 0.19 && took < 20; }
int main(void) {
    struct timespec a, b, until; struct timeval c; time_t d = time(NULL);
    clock_gettime(CLOCK_REALTIME, &a); timespec_get(&b, TIME_UTC); gettimeofday(&c, NULL);
    printf("%d %ld\n", a.tv_sec - d <= 1 && b.tv_sec - d <= 1 && c.tv_sec - d <= 1, (long)d);
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; pthread_cond_t cond = PTHREAD_COND_INITIALIZER, steady;
    pthread_condattr_t attr; pthread_condattr_init(&attr); pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&steady, &attr);
    sem_t sem; sem_init(&sem, 0, 0);
    pthread_mutex_lock(&mutex);
    double since = mono(); until = soon(CLOCK_REALTIME); pthread_cond_timedwait(&cond, &mutex, &until); printf("%d", lasted(since));
    since = mono(); until = soon(CLOCK_MONOTONIC); pthread_cond_timedwait(&steady, &mutex, &until); printf("%d", lasted(since));
    since = mono(); until = soon(CLOCK_REALTIME); sem_timedwait(&sem, &until); printf("%d", lasted(since));
    since = mono(); until = soon(CLOCK_REALTIME); pthread_mutex_timedlock(&mutex, &until); printf("%d", lasted(since));
    since = mono(); until = soon(CLOCK_REALTIME); clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &until, NULL); printf("%d", lasted(since));
    since = mono(); until = soon(CLOCK_MONOTONIC); clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL); printf("%d\n", lasted(since));
}
"""


@pytest.mark.parametrize("seconds", [100000.25, -100000.25])
def test_a_program_in_c_sees_one_clock_by_every_call_and_its_waits_last(job, tmp_path, seconds):
    (tmp_path / "clock.c").write_text(C)
    subprocess.run(["cc", "-o", str(tmp_path / "clock"), str(tmp_path / "clock.c"), "-lpthread"], check=True)
    before = time.time()
    job.run(f"clock:skew,seconds={seconds}", [str(tmp_path / "clock")])
    one_clock, shown, waits = job.log("launcher/stdout.log").split()
    assert one_clock == "1" and waits == "111111" and abs(int(shown) - before - seconds) < 60


def test_a_victim_that_dies_first_and_a_rank_that_never_comes(job):
    job.run(["clock:jump,rank=1,after_s=60,seconds=5", "clock:jump,rank=7,seconds=5"], job.command("pass"))
    assert (job.where(0), job.where(1)) == ([], [])


def test_a_killed_harness_leaves_nothing(job, killed):
    killed(["clock:skew,rank=1,seconds=5", "--", *job.command("say('up')\nuntil(lambda: False)")], lambda: job.said(1))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("clock:skew,seconds=0", "is 0 or more than"),
        ("clock:jump", "needs seconds"),
        ("clock:jump,seconds=1,op=all_reduce", "cannot aim by op"),
    ],
)
def test_what_cannot_be_is_one_line(fault, words):
    with pytest.raises(catalog.UsageError) as told:
        parse(fault, KNOWN)
    assert words in str(told.value)


def test_a_skew_at_a_time_is_refused_and_nothing_is_started(job):
    assert "clock:jump comes later" in job.refused("clock:skew,seconds=1,after_s=2")
