"""Each fault of a folder's view, seen by the rank behind it and in the folder itself; who is left alone; what is undone and refused."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest

from dtprobe.errors import UsageError

pytestmark = pytest.mark.needs("fuse", "mount", "linux>=5.2")

FILES = """
import errno
data = shared / "data"
def outcome(act):
    try:
        return act()
    except OSError as error:
        return errno.errorcode[error.errno]
"""


@pytest.fixture
def folder(job):
    made = job.shared / "data"
    made.mkdir()
    return made


@pytest.fixture(autouse=True)
def no_mount_seen(job):
    yield
    assert str(job.shared) not in Path("/proc/self/mountinfo").read_text()


# Stale answers

CHANGES = {
    "create": ("(data / 'new').exists()", "(data / 'new').write_text('x')", "getattr", "/new: no such file"),
    "resize": ("(data / 'old').stat().st_size == 9", "(data / 'old').write_text('x' * 9)", "getattr", "/old: 5 bytes"),
    "unlink": ("not (data / 'old').exists()", "(data / 'old').unlink()", "getattr", "/old: 5 bytes"),
    "listing": ("'new' in os.listdir(data)", "(data / 'new').write_text('x')", "readdir", "/: 1 names"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_when_the_answer_s_time_is_over_and_by_others_at_once(job, folder, change):
    seen, act, call, words = CHANGES[change]
    (folder / "old").write_text("12345")
    code = f"""
if rank == 0:
    until(lambda: (shared / "asked").exists())
    {act}
    (shared / "changed").touch()
    say({seen})
else:
    before = time.monotonic()
    assert not ({seen})
    answered = time.monotonic()
    (shared / "asked").touch()
    until(lambda: (shared / "changed").exists())
    say({seen})
    until(lambda: {seen})
    say(time.monotonic() - before)
    say(time.monotonic() - answered)
"""
    job.run_local(f"filesystem:cache,path={folder},rank=1,seconds=2", FILES + code)
    assert job.said(0) == ["True"], job.log("rank1/stderr.log")
    at_once, at_most, at_least = job.said(1)
    assert at_once == "False" and float(at_most) >= 2 > 0.5 * float(at_least)
    assert {one.rank for one in job.fired()} == {1} and not job.problems()
    (one,) = [one for one in job.fired() if one.call == call and words in one.detail]
    assert "told" in one.detail and one.ended_ns > one.t_ns


def test_opening_a_file_asks_anew_unless_it_is_told_not_to(job, folder):
    (folder / "old").write_text("12345")
    code = """
if rank == 0:
    until(lambda: (shared / "asked-1").exists() and (shared / "asked-2").exists())
    (data / "old").write_text("123456789")
    (shared / "changed").touch()
else:
    (data / "old").stat()
    (shared / f"asked-{rank}").touch()
    until(lambda: (shared / "changed").exists())
    say((data / "old").stat().st_size, (data / "old").read_text(), (data / "old").stat().st_size)
"""
    texts = [f"filesystem:cache,path={folder},rank=1,seconds=60", f"filesystem:cache,path={folder},rank=2,seconds=60,cto=no"]
    job.run_local(texts, FILES + code, ranks=3)
    assert (job.said(1), job.said(2)) == (["5 123456789 9"], ["5 12345 5"])
    assert [{one.rank for one in job.fired(index)} for index in (0, 1)] == [{1}, {2}]


def test_only_what_is_asked_for_is_remembered_and_never_what_the_rank_did_itself(job, folder):
    (folder / "old").write_text("12345")
    code = """
if rank == 0:
    until(lambda: (shared / "asked").exists())
    (data / "old").write_text("123456789")
    (data / "new").touch()
    (data / "other").touch()
    (shared / "changed").touch()
else:
    names = ("new", "other", "mine")
    say(*[(data / name).exists() for name in names], (data / "old").stat().st_size)
    (data / "mine").write_text("x")
    (shared / "asked").touch()
    until(lambda: (shared / "changed").exists())
    say(*[(data / name).exists() for name in names], (data / "old").stat().st_size)
"""
    job.run_local(f"filesystem:cache,path={folder},files=[!o]*,rank=1,seconds=60,what=negative", FILES + code)
    assert job.said(1) == ["False False False 5", "False True True 9"]
    (one,) = job.fired()
    assert "/new: no such file" in one.detail and one.ended_ns is not None


@pytest.mark.parametrize("make", ["os.mkdir(data / 'new')", "os.close(os.open(data / 'new', os.O_CREAT | os.O_EXCL))"])
def test_a_name_whose_making_is_refused_is_believed_in_from_then_on(job, folder, make):
    code = f"""
if rank == 0:
    until(lambda: (shared / "asked").exists())
    (data / "new").mkdir()
    (shared / "changed").touch()
else:
    say((data / "new").exists())
    (shared / "asked").touch()
    until(lambda: (shared / "changed").exists())
    say((data / "new").exists(), outcome(lambda: {make}), (data / "new").exists())
"""
    job.run_local(f"filesystem:cache,path={folder},rank=1,seconds=60", FILES + code)
    assert job.said(1) == ["False", "False EEXIST True"]


FILESTORE = """
from datetime import timedelta
import torch.distributed as dist
store = dist.FileStore(str(shared / "data" / "store"), -1)
store.set_timeout(timedelta(seconds=60))
if rank == 0:
    until(lambda: (shared / "waits").exists())
    store.set("key", "value")
    (shared / "set").touch()
    until(lambda: (shared / "got").exists())
else:
    (shared / "data" / "store").stat()
    before = time.monotonic()
    (shared / "waits").touch()
    until(lambda: (shared / "set").exists())
    store.get("key")
    say(time.monotonic() - before)
    (shared / "got").touch()
"""


@pytest.mark.needs("gloo")
def test_a_rank_in_torch_s_filestore_waits_for_the_attributes(job, folder):
    record = job.run_local(f"filesystem:cache,path={folder},rank=1,seconds=6,cto=no", FILESTORE)
    assert [one.exit_code for one in record.exits] == [0, 0], job.log("rank1/stderr.log")
    assert float(job.said(1)[0]) >= 5.5
    assert any(one.call == "getattr" and "/store" in one.detail for one in job.fired())


SAFE = """
from dtprobe.framework.filestore import SafeFileStore
(data / "r.0").exists()
(shared / f"asked{rank}").touch()
until(lambda: all((shared / f"asked{one}").exists() for one in (0, 1)))
with SafeFileStore(data, run="r", rank=rank, world_size=2, timeout_s=30) as store:
    store.check(["key"])
    store.add("waits", 1)
    if rank == 0:
        until(lambda: store.add("waits", 0) == 2)
        store.set("key", "value")
    else:
        say(store.get("key"))
"""


@pytest.mark.needs("gloo")
def test_a_rank_in_the_framework_s_store_does_not_wait_for_what_its_client_remembers(job, folder):
    record = job.run_local(f"filesystem:cache,path={folder},rank=1,seconds=300,cto=no", FILES + SAFE)
    assert [one.exit_code for one in record.exits] == [0, 0], job.log("rank1/stderr.log")
    assert job.said(1) == ["b'value'"]
    assert list(folder.iterdir()) == []


# Calls that are slow or fail


def test_a_delayed_call_is_late_and_no_other(job, folder):
    for name in "ab":
        (folder / name).write_text("hello")
    code = """
for name in ("a", "b", "a", "a"):
    before = time.monotonic()
    text = (data / name).read_text()
    say(text, time.monotonic() - before)
"""
    job.run_local(f"filesystem:delay,path={folder},rank=1,files=a,op=open,nth=2,seconds=1.5", FILES + code)
    took_s = {rank: [float(line.split()[1]) for line in job.said(rank)] for rank in (0, 1)}
    assert [line.split()[0] for line in job.said(1)] == ["hello"] * 4
    assert took_s[1][2] >= 1.5 > max(took_s[0] + took_s[1][:2] + took_s[1][3:])
    (one,) = job.fired()
    assert (one.rank, one.call, one.nth) == (1, "open", 2) and one.ended_ns - one.t_ns >= 1.5e9


def test_the_nth_write_fails_and_the_others_reach_the_folder(job, folder):
    code = """
file = os.open(data / f"out-{rank}.pt", os.O_CREAT | os.O_WRONLY)
say(*[outcome(lambda: os.write(file, b"12345")) for _ in range(3)])
say((data / "log").write_text("kept"))
"""
    job.run_local(f"filesystem:eio,path={folder},files=*.pt,rank=1,op=write,nth=2", FILES + code)
    assert job.said(0) == ["5 5 5", "4"] and job.said(1) == ["5 EIO 5", "4"]
    assert (folder / "out-1.pt").read_text() == "1234512345"
    assert [(one.rank, one.call, one.nth) for one in job.fired()] == [(1, "write", 2)]


def test_a_full_file_system_takes_nothing_new_and_still_reads(job, folder):
    (folder / "old").write_text("hello")
    code = """
say(outcome(lambda: (data / f"new-{rank}").write_text("x")), outcome(lambda: os.mkdir(data / f"dir-{rank}")))
say((data / "old").read_text())
"""
    job.run_local(f"filesystem:enospc,path={folder},rank=1", FILES + code)
    assert job.said(0) == ["1 None", "hello"] and job.said(1) == ["ENOSPC ENOSPC", "hello"]
    assert not (folder / "new-1").exists() and not (folder / "dir-1").exists()
    assert {one.call for one in job.fired()} == {"create", "mkdir"}


@pytest.mark.parametrize(("fault", "left"), [("torn,bytes=3", b"abcdeabc\x00\x00abcde"), ("torn", b"abcdeab\x00\x00\x00abcde")])
def test_a_torn_write_leaves_a_hole_and_the_writer_hears_of_success(job, folder, fault, left):
    code = """
file = os.open(data / f"out-{rank}", os.O_CREAT | os.O_WRONLY)
say(*[os.write(file, b"abcde") for _ in range(3)])
os.close(file)
"""
    job.run_local(f"filesystem:{fault},path={folder},rank=1,nth=2", FILES + code)
    assert job.said(1) == ["5 5 5"]
    assert (folder / "out-0").read_bytes() == b"abcde" * 3 and (folder / "out-1").read_bytes() == left
    assert "of 5 bytes at 5 are written" in job.fired()[0].detail and job.where() == [(1, 2)]


def test_lost_writes_lose_a_checkpoint_that_was_renamed_into_place(job, folder):
    code = """
with open(data / f".tmp-{rank}", "wb") as file:
    file.write(b"weights" * 1000)
    file.flush()
    os.fsync(file.fileno())
os.rename(data / f".tmp-{rank}", data / f"ckpt-{rank}")
"""
    record = job.run_local(f"filesystem:lost,path={folder},rank=1,files=.tmp*", FILES + code)
    assert [one.exit_code for one in record.exits] == [0, 0]
    assert (folder / "ckpt-0").stat().st_size == 7000 and (folder / "ckpt-1").stat().st_size == 0
    assert "0 of 7000 bytes" in job.fired()[0].detail


def test_two_faults_of_one_folder_and_a_third_of_another_meet_the_ranks_that_are_meant(job, folder):
    (job.shared / "more").mkdir()
    (folder / "a").write_text("hello")
    (job.shared / "more" / "a").write_text("hello")
    code = """
more = shared / "more"
say(outcome((data / "a").read_text), outcome(lambda: os.mkdir(data / f"d{rank}")), outcome((more / "a").read_text))
"""
    texts = [
        f"filesystem:eio,path={folder},rank=1+2,op=open",
        f"filesystem:enospc,path={folder},rank=1,op=mkdir",
        f"filesystem:eio,path={job.shared / 'more'},rank=2,op=read",
    ]
    job.run_local(texts, FILES + code, ranks=3)
    assert [job.said(rank) for rank in range(3)] == [["hello None hello"], ["EIO ENOSPC hello"], ["EIO None EIO"]]
    # The kernel asks again for a page that it was refused.
    assert [{(one.rank, one.call) for one in job.fired(index)} for index in range(3)] == [
        {(1, "open"), (2, "open")},
        {(1, "mkdir")},
        {(2, "read")},
    ]


def test_a_fault_lasts_from_its_time_on_and_as_long_as_it_is_meant_to(job, folder):
    (folder / "a").write_text("hello")
    code = """
if rank == 0:
    sys.exit()
read = lambda: outcome((data / "a").read_text)
say(read())
until(lambda: read() == "EIO")
until(lambda: read() == "hello")
say("again")
"""
    job.run_local(f"filesystem:eio,path={folder},rank=1,op=open,after_s=1,for_s=1", FILES + code)
    assert job.said(1) == ["hello", "again"]
    assert {one.rank for one in job.fired()} == {1}


def test_chance_is_repeated_by_the_seed(job, folder):
    (folder / "a").write_text("hello")
    code = "for _ in range(60):\n    outcome((data / 'a').read_text)\n"
    met = []
    for seed in (5, 5, 6):
        job.run_local(f"filesystem:eio,path={folder},op=open,probability=0.3", FILES + code, ranks=1, seed=seed)
        met.append(job.where())
    assert met[0] == met[1] != met[2] and 5 < len(met[0]) < 35


# What a view passes on


def test_a_view_behaves_as_the_folder_does(job, folder):
    """The fault never fires; everything else that programs do with files works through the view."""
    code = """
import mmap, shutil
os.chdir(data)
Path("d/e").mkdir(parents=True)
Path("d/e/f").write_text("one")
with open("d/e/f", "a") as file:
    file.write("two")
os.link("d/e/f", "d/hard")
os.symlink("e/f", "d/soft")
say(Path("d/soft").read_text(), os.readlink("d/soft"), os.stat("d/hard").st_nlink)
os.truncate("d/e/f", 4)
os.utime("d/e/f", ns=(10**18, 2 * 10**18))
os.chmod("d/e/f", 0o640)
found = os.stat("d/e/f")
say(found.st_size, found.st_mtime_ns, oct(found.st_mode), found.st_uid == os.getuid())
with open("big", "w+b") as file:
    file.truncate(1 << 20)
    with mmap.mmap(file.fileno(), 0) as mapped:
        mapped[5000:5005] = b"hello"
        mapped.flush()
with open("gone", "w+") as file:
    file.write("still ")
    file.flush()
    os.unlink("gone")
    say(sorted(os.listdir(".")))
    file.write("there")
    file.flush()
    os.ftruncate(file.fileno(), 8)
    os.fchmod(file.fileno(), 0o600)
    file.seek(0)
    say(file.read(), os.fstat(file.fileno()).st_size)
os.rename("d/hard", "d/renamed")
say(sorted(os.listdir("d")), outcome(lambda: os.stat("d/hard")), outcome(lambda: os.rmdir("d")))
with open("append", "ab") as one, open("append", "ab") as two:
    for file in (one, two, one):
        file.write(b"x")
        file.flush()
shutil.rmtree("d")
say(os.statvfs(".").f_bsize > 0, os.access("big", os.R_OK), sorted(os.listdir(".")))
"""
    job.run_local(f"filesystem:eio,path={folder},op=fallocate", FILES + code, ranks=1)
    assert job.said(0) == [
        "onetwo e/f 2",
        "4 2000000000000000000 0o100640 True",
        "['big', 'd']",
        "still th 8",
        "['e', 'renamed', 'soft'] ENOENT ENOTEMPTY",
        "True True ['append', 'big']",
    ], job.log("rank0/stderr.log")
    assert (folder / "big").read_bytes()[5000:5005] == b"hello" and (folder / "append").read_bytes() == b"xxx"
    assert job.where() == [] and "no call on" in job.problems()


@pytest.mark.parametrize("lock", ["fcntl.flock", "fcntl.lockf"])
def test_locks_hold_between_the_views_of_two_ranks(job, folder, lock):
    code = f"""
import fcntl
file = open(data / "lock", "a")
if rank == 0:
    {lock}(file, fcntl.LOCK_EX)
    (shared / "held").touch()
    until(lambda: (shared / "refused").exists())
    time.sleep(0.3)
    (shared / "free").touch()
    file.close()
else:
    until(lambda: (shared / "held").exists())
    say(outcome(lambda: {lock}(file, fcntl.LOCK_EX | fcntl.LOCK_NB)))
    (shared / "refused").touch()
    {lock}(file, fcntl.LOCK_EX)
    say((shared / "free").exists())
"""
    job.run_local(f"filesystem:eio,path={folder},op=fallocate", FILES + code)
    assert job.said(1) == ["EAGAIN", "True"], job.log("rank1/stderr.log")


# Foreign commands


def test_a_rank_of_a_foreign_command_has_its_own_view_and_the_others_none(job, folder):
    (folder / "a").write_text("hello")
    code = "say(outcome((data / 'a').read_text), 'fuse.dtprobe' in open('/proc/self/mountinfo').read())"
    job.run(f"filesystem:eio,path={folder},rank=1,op=open", job.command(FILES + code))
    assert (job.said(0), job.said(1)) == (["hello False"], ["EIO True"])
    assert job.where() == [(1, 1)]


def test_without_rank_a_command_has_a_view_as_a_whole_and_each_rank_its_own_count(job, folder):
    (folder / "a").write_text("hello")
    code = "say(*[outcome((data / 'a').read_text) for _ in range(3)])"
    job.run(f"filesystem:eio,path={folder},op=open,nth=2", job.command(FILES + code))
    assert job.said(0) == job.said(1) == ["hello EIO hello"]
    assert sorted(job.where()) == [(0, 2), (1, 2)]
    job.run(f"filesystem:eio,path={folder},op=open", ["cat", str(folder / "a")])
    assert "Input/output error" in job.log() and job.where() == [(None, 1)]


def test_the_run_s_own_artifacts_are_spared(job):
    code = "say(outcome((shared / 'a').touch))\n(Path(os.environ['DTPROBE_RANK_FOLDER']) / 'a').write_text('kept')"
    job.run_local(f"filesystem:enospc,path={job.shared},files=a", FILES + code, ranks=1)
    assert job.said() == ["ENOSPC"], job.log("rank0/stderr.log")
    assert (job.record.folder / "rank0" / "a").read_text() == "kept"


def test_a_folder_in_the_run_s_scratch_is_made(job):
    code = "say(outcome(lambda: (Path(os.environ['DTPROBE_SCRATCH']) / 'store' / str(rank)).write_text('x')))"
    job.run_local("filesystem:enospc,path={scratch}/store,rank=1", FILES + code)
    assert (job.said(0), job.said(1)) == (["1"], ["ENOSPC"])


# Ends

STUCK = "(shared / f'waits-{rank}').touch()\n(shared / 'data' / 'a').read_text()\n"


def test_a_rank_that_waits_in_a_call_is_ended_at_once_and_meets_no_dead_file_system(job, folder):
    (folder / "a").write_text("hello")
    job.command(STUCK + "say('read')\nuntil(lambda: False)")
    argv = [sys.executable, str(job.shared / "rank.py")]
    record = job.run(f"filesystem:delay,path={folder},op=open,seconds=600", argv, timeout_s=5)
    assert record.timed_out and record.ended_ns - record.started_ns < 120e9
    assert job.fired()[0].ended_ns is not None and job.log() == ""


def test_a_victim_that_is_killed_while_it_waits_dies(job, folder):
    (folder / "a").write_text("hello")
    code = """
if rank == 1:
    (shared / "waits").touch()
    (shared / "data" / "a").read_text()
else:
    until(lambda: (shared / "waits").exists())
    time.sleep(0.5)
    os.kill(int((shared / "pid-1").read_text()), 9)
    until(lambda: ended(1))
    say("ended")
"""
    job.run(f"filesystem:delay,path={folder},rank=1,op=open,seconds=600", job.command(code))
    assert job.said(0) == ["ended"] and job.exit_of(1) == -signal.SIGKILL
    assert job.where() == [(1, 1)] and not job.processes()


def helpers(job) -> list[psutil.Process]:
    """Who is waited for by the harness, and who serves the views, in this order."""
    found = [one for one in job.processes() if any(word.endswith("views.py") for word in one.cmdline())]
    return sorted(found, key=lambda one: (one.create_time(), one.pid))


def test_a_helper_that_dies_hangs_nobody_and_is_said(job, folder, eventually):
    (folder / "a").write_text("hello")

    def kill():
        eventually((job.shared / "waits-0").exists)
        helpers(job)[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    record = job.run_local(f"filesystem:delay,path={folder},op=open,seconds=600", STUCK, ranks=1)
    killer.join()
    assert record.exits[0].exit_code == 1 and "ConnectionAbortedError" in job.log("rank0/stderr.log")
    assert "the helper ended before the job did" in job.problems()


@pytest.mark.nightly
def test_a_helper_that_stands_still_does_not_hang_the_harness(job, folder, eventually):
    """The rank waits in the kernel where only the end of the helper reaches it."""
    (folder / "a").write_text("hello")

    def freeze():
        eventually((job.shared / "waits-0").exists)
        for one in helpers(job):
            one.suspend()
        (job.shared / "frozen").touch()

    freezer = threading.Thread(target=freeze)
    freezer.start()
    code = "(shared / 'waits-0').touch()\nuntil((shared / 'frozen').exists)\n(shared / 'data' / 'a').read_text()\nsay('read')"
    job.command(code)
    argv = [sys.executable, str(job.shared / "rank.py")]
    record = job.run(f"filesystem:delay,path={folder},op=write,seconds=600", argv, timeout_s=15)
    freezer.join()
    assert record.timed_out and job.said() == [] and not job.processes()
    assert "did not stop in" in job.problems()


def test_a_killed_harness_leaves_no_view(job, folder, killed):
    (folder / "a").write_text("hello")
    killed([f"filesystem:delay,path={folder},op=open,seconds=600", "--", *job.command(STUCK)], (job.shared / "waits-1").exists)
    assert (folder / "a").read_text() == "hello"


# What cannot be


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("filesystem:cahce,path=data", "did you mean cache"),
        ("filesystem:eio", "needs path"),
        ("filesystem:cache,path=data,seconds=0", "not between 0 and 600"),
        ("filesystem:cache,path=data,nth=2", "leave nth out"),
        ("filesystem:cache,path=data,what=attr+size", "what=size is unknown"),
        ("filesystem:torn,path=data,bytes=-1", "negative"),
        ("filesystem:torn,path=data,op=read", "op=read is none of write"),
        ("filesystem:eio,path=data,node=1", "cannot aim by node"),
        ("filesystem:eio,path=nowhere", "there is no folder"),
        ("filesystem:eio,path=data/file", "is no folder"),
        ("filesystem:eio,path=/", "cannot be viewed"),
        ("filesystem:eio,path=/proc/self", "cannot be viewed"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_started(job, folder, fault, words):
    (folder / "file").touch()
    assert words in job.refused(fault)


def test_folders_in_each_other_are_refused(job, folder):
    (folder / "in").mkdir()
    with pytest.raises(UsageError, match="one lies in the other"):
        job.run_local([f"filesystem:eio,path={folder}", f"filesystem:eio,path={folder / 'in'}"], "say('ran')")
    assert job.said() == []


def test_by_command_line_a_run_says_what_fired(job, folder):
    process = job.cli(f"filesystem:enospc,path={folder},rank=1", "--", *job.command("(shared / 'data' / f'x{rank}').mkdir()"))
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    (fault,) = json.loads(out)["faults"]
    assert fault["count"] == 1 and (fault["fired"][0]["rank"], fault["fired"][0]["call"]) == (1, "mkdir")
    assert [one.name for one in folder.iterdir()] == ["x0"]
