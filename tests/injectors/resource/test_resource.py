"""Limits as the victim meets them, by each mechanism that this machine has; who is not meant keeps what it had."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from dtprobe import catalog, cgroup
from dtprobe.errors import Unavailable
from dtprobe.inject.spec import parse

KNOWN = catalog.injectors()[0]
GREEDY = """
if rank == 1:
    time.sleep(float(os.environ.get("WAIT", 0)))
    kept = []
    try:
        for _ in range(40):
            kept.append(bytearray(os.urandom(1)) * (10 << 20))
        say("had 400M")
    except MemoryError:
        say("MemoryError")
else:
    until(lambda: ended(1))
"""


def groups_left():
    return list(Path("/sys/fs/cgroup").glob(f"**/dtprobe-test-{os.getpid()}-*"))


@pytest.fixture
def nothing_left(job):
    yield
    assert not groups_left()


@pytest.mark.needs("cgroup-memory")
@pytest.mark.parametrize("local", [False, True])
def test_the_kernel_kills_the_rank_that_has_too_little_memory(job, nothing_left, local):
    text = "resource:memory,rank=1,limit=100M,by=cgroup"
    if local:
        record = job.run_local(text, "if rank == 0: sys.exit()\n" + GREEDY)
        assert [(one.exit_code, one.signal) for one in record.exits] == [(0, None), (None, signal.SIGKILL)]
    else:
        job.extra = {"WAIT": "1"}
        job.run(text, job.command(GREEDY))
        assert (job.exit_of(0), job.exit_of(1)) == (0, -signal.SIGKILL)
    (one,) = job.fired()
    assert one.rank == 1 and "cgroup v" in one.detail and one.detail.endswith("1 OOM kills")


@pytest.mark.needs("cgroup-memory")
def test_a_limit_that_is_lifted_again_kills_nobody(job, nothing_left):
    job.extra = {"WAIT": "2"}
    job.run("resource:memory,rank=1,limit=100M,for_s=0.5", job.command(GREEDY))
    assert job.said(1) == ["had 400M"]
    (one,) = job.fired()
    assert one.ended_ns - one.t_ns >= 0.5e9 and "0 OOM kills" in one.detail


def test_where_memory_is_limited_by_rlimit_an_allocation_fails(job):
    job.run_local("resource:memory,rank=1,limit=150M,by=rlimit", GREEDY.replace("ended(1)", "(shared / 'said-1').exists()"))
    assert job.said(1) == ["MemoryError"] and "RLIMIT_DATA 157286400" in job.fired()[0].detail


@pytest.mark.needs("cgroup-cpu")
def test_a_rank_gets_its_share_of_processor_time_only(job, nothing_left):
    code = """
if rank == 0:
    until(lambda: ended(1))
else:
    until(lambda: "cpu" in open("/proc/self/cgroup").read() and "dtprobe-" in open("/proc/self/cgroup").read())
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() < began + 2:
        pass
    say(round((time.process_time() - used) / (time.monotonic() - began), 2))
"""
    job.run("resource:cpu,rank=1,cores=0.1", job.command(code))
    assert float(job.said(1)[0]) < 0.3
    assert "cores" not in job.fired()[0].detail and "throttled" in job.fired()[0].detail


@pytest.mark.needs("cores:2")
@pytest.mark.parametrize(("by", "how"), [("any", "cpuset.cpus=0"), ("affinity", "affinity 0")])
def test_a_rank_is_held_to_its_cores(job, nothing_left, by, how):
    if by == "any" and isinstance(reason := _groups().place("x", "cpuset"), Unavailable):
        pytest.skip(str(reason))
    job.run_local(f"resource:cpuset,rank=1,cpus=0,by={by}", "say(sorted(os.sched_getaffinity(0)))")
    assert job.said(1) == ["[0]"] and job.said(0) == [str(sorted(os.sched_getaffinity(0)))]
    assert how in job.fired()[0].detail


def _groups():
    return sys.modules[KNOWN["resource"].make.__module__].groups


OPEN = """
import errno, resource
def most():
    kept = []
    try:
        for _ in range(300):
            kept.append(open("/dev/null"))
        return "300"
    except OSError as error:
        return errno.errorcode[error.errno]
"""


def test_a_running_rank_runs_out_of_files_and_gets_them_back(job):
    code = (
        OPEN
        + """
if rank == 1:
    say(most())
    until(lambda: most() == "EMFILE")
    say("EMFILE")
    until(lambda: most() == "300")
    say("300")
else:
    until(lambda: ended(1))
    say(most())
"""
    )
    job.run("resource:nofile,rank=1,limit=64,after_s=1,for_s=1", job.command(code))
    assert (job.said(0), job.said(1)) == (["300"], ["300", "EMFILE", "300"])
    assert "RLIMIT_NOFILE 64" in job.fired()[0].detail


def test_without_a_rank_the_whole_command_is_limited_before_it_starts(job):
    job.run("resource:nofile,limit=100", job.command(OPEN + "say(most())"))
    assert (job.said(0), job.said(1)) == (["EMFILE"], ["EMFILE"]) and job.where() == [(None, None)]


def test_a_rank_without_python_is_limited_too(job):
    until = [
        "bash",
        "-c",
        "for i in $(seq 3000); do [ $(ulimit -Sn) = 77 ] && echo limited $RANK && exit; [ $RANK = 0 ] && exit; sleep 0.01; done",
    ]
    job.run("resource:nofile,rank=1,limit=77", job.launching(*until))
    assert job.log("launcher/stdout.log") == "limited 1\n" and job.where() == [(1, None)]


LOCK = """
import ctypes, mmap
memory = mmap.mmap(-1, 1 << 20)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None, use_errno=True)
say("locked" if libc.mlock(ctypes.c_void_p(start), 1 << 20) == 0 else os.strerror(ctypes.get_errno()))
"""


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] in range(0, 2 << 20), reason="nothing may be locked here anyway"
)
@pytest.mark.parametrize("local", [False, True])
def test_pinning_memory_fails_also_for_root(job, local):
    if local:
        job.run_local("resource:memlock,rank=1,limit=64K", LOCK + "time.sleep(0.2)")
    else:
        job.run("resource:memlock,rank=1,limit=64K", job.command(LOCK + "time.sleep(0.2)"))
    assert (job.said(0), job.said(1)) == (["locked"], ["Cannot allocate memory"])
    assert job.where() == [(1, None)]


FILL = """
import errno
name = f"/dev/shm/dtprobe-test-{os.getpid()}"
try:
    with open(name, "wb") as file:
        file.write(bytes(4 << 20))
    say("4M")
except OSError as error:
    say(errno.errorcode[error.errno])
finally:
    os.unlink(name)
time.sleep(0.2)
"""


@pytest.mark.needs("root", "mount")
@pytest.mark.parametrize("local", [False, True])
def test_shared_memory_is_full_for_the_rank_that_is_meant(job, local):
    before = Path("/proc/self/mountinfo").read_text()
    if local:
        job.run_local("resource:shm,rank=1,limit=1M", FILL)
    else:
        job.run("resource:shm,rank=1,limit=1M", job.command(FILL))
    assert (job.said(0), job.said(1)) == (["4M"], ["ENOSPC"])
    assert job.where() == [(1, None)] and Path("/proc/self/mountinfo").read_text() == before


THREADS = """
import threading
go = threading.Event()
def more():
    try:
        for _ in range(30):
            threading.Thread(target=go.wait, daemon=True).start()
        return "30"
    except RuntimeError:
        return "refused"
"""


def test_a_rank_cannot_start_more_threads_than_it_may(job, nothing_left):
    if isinstance(reason := _groups().place("x", "pids"), Unavailable):
        pytest.skip(str(reason))
    job.run_local("resource:pids,rank=1,limit=10", THREADS + "say(more())\nos._exit(0)")
    assert (job.said(0), job.said(1)) == (["30"], ["refused"])
    assert "forks refused" in job.fired()[0].detail and not job.fired()[0].detail.endswith(" 0 forks refused")


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel holds others than root to it")
def test_a_limit_that_root_passes_by_is_refused(job):
    assert "does not hold root to RLIMIT_NPROC" in job.refused("resource:pids,limit=10,by=rlimit")


def test_a_victim_that_dies_first_leaves_nothing(job, nothing_left):
    job.run("resource:nofile,rank=1,limit=64,after_s=60", job.command("pass"))
    assert job.where() == []
    job.run_local("resource:pids,rank=1,limit=64", "os.kill(os.getpid(), 9)")
    assert job.where() == [(1, None)]


@pytest.mark.needs("cgroup-memory")
def test_a_killed_harness_leaves_no_group(job, killed):
    def groups():
        runs = [path.name.split("-")[-1] for path in (job.shared / "runs" / "inject").glob("*")]
        return [path for run in runs for path in Path("/sys/fs/cgroup").glob(f"**/dtprobe-*{run}*") if "memory" in path.parts]

    argv = job.command("say('up')\nuntil(lambda: False)")
    killed(["resource:memory,rank=1,limit=200M", "--", *argv], lambda: job.said(1) and groups())
    assert not groups()


def test_the_v2_group_is_made_where_the_controller_is_handed_down(tmp_path):
    """This machine's v2 limits nothing: the hierarchy is a folder that looks like one."""
    slice_ = tmp_path / "user.slice"
    own = slice_ / "mine.scope"
    own.mkdir(parents=True)
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids")
    (slice_ / "cgroup.subtree_control").write_text("memory pids")
    (own / "cgroup.subtree_control").write_text("")
    mountinfo = f"30 23 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n"

    def place(controller):
        return cgroup.limiting("new", controller, mountinfo=mountinfo, membership="0::/user.slice/mine.scope\n")

    assert place("memory") == slice_ / "new" and place("cpu") == tmp_path / "new"
    told = place("cpuset")
    assert isinstance(told, Unavailable) and "no cgroup hands the cpuset controller" in told.reason


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("resource:memory,limit=lots", "is no size"),
        ("resource:memory", "needs limit"),
        ("resource:cpu,cores=0", "not between"),
        ("resource:cpuset,cpus=9999", "cannot be used here"),
        ("resource:nofile,limit=0", "less than 1"),
        ("resource:shm,limit=10", "less than a page"),
        ("resource:pids,limit=5,by=magic", "unknown"),
        ("resource:nofile,limit=5,op=all_reduce", "cannot aim by op"),
    ],
)
def test_what_cannot_be_is_one_line(fault, words):
    with pytest.raises(catalog.UsageError) as told:
        parse(fault, KNOWN)
    assert words in str(told.value)


def test_a_limit_from_the_start_that_is_asked_for_later_is_refused(job):
    assert "leave after_s out" in job.refused("resource:shm,limit=1M,after_s=1")
