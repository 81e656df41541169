from __future__ import annotations

import os
import re
import signal

import pytest

from dtprobe.errors import UsageError
from dtprobe.probes.procfs import condition
from dtprobe.probes.strace import Strace

PROGRAM = """
import os, threading, time
print("pid", os.getpid(), flush=True)
threading.Thread(target=print, args=("in a thread",)).start()
print("ready", flush=True)
if "STAY" in os.environ:
    time.sleep(600)
"""


@pytest.mark.needs("strace")
def test_a_started_thread_shows_as_a_clone_of_the_rank_itself_and_as_nothing_else(ranks):
    job = ranks(1)
    job.under(Strace(calls="clone,clone3,nosuchcall"))
    job.run(PROGRAM)
    assert job.wait() == [0]
    text_of = job.rank(0) / "strace.txt"
    job.until(lambda: text_of.read_text().endswith("+++ exited with 0 +++\n"), "strace's last line")
    recorded = job.stop()
    pid = job.children[0].pid
    assert f"pid {pid}\n" in (job.rank(0) / "stdout.log").read_text()
    text = text_of.read_text()
    assert re.search(rf"^{pid} +\d+\.\d{{6}} clone3?\(.*CLONE_THREAD.*\) = \d+ <\d\.\d+>$", text, re.MULTILINE), text
    assert not re.search(r" (?:mmap|openat|read)\(", text)
    assert recorded.files == (text_of,) and not recorded.problems
    assert (job.rank(0) / "stderr.log").read_text() == ""


@pytest.mark.needs("strace-seccomp")
def test_a_new_thread_makes_a_traced_call_at_once_after_which_the_others_are_free(ranks):
    job = ranks(1)
    job.under(Strace(calls="clone,clone3"))
    job.run(PROGRAM)
    assert job.wait() == [0]
    text_of = job.rank(0) / "strace.txt"
    job.until(lambda: text_of.read_text().endswith("+++ exited with 0 +++\n"), "strace's last line")
    (thread,) = re.findall(r"parent_tid=\[(\d+)\]", text_of.read_text())
    first = next(line for line in text_of.read_text().splitlines() if line.startswith(f"{thread} "))
    assert "set_robust_list(" in first


@pytest.mark.needs("strace")
def test_a_stopped_and_a_killed_rank_keep_nobody_waiting(ranks):
    job = ranks(2)
    job.under(Strace(calls="clone,clone3"))
    job.run(PROGRAM, {"STAY": "1"})
    for rank in (0, 1):
        job.until(job.says(rank, "ready"), "ready")
    job.children[0].send_signal(signal.SIGSTOP)
    job.children[1].kill()
    job.until(lambda: condition(job.children[0].pid).state in "Tt", "the stop")
    assert len(job.stop().files) == 2


def test_each_rank_and_a_launcher_has_its_file_and_the_rank_keeps_its_command(ranks):
    job = ranks(2)
    recorder = Strace(calls="%network,mmap").recorder(job.where)
    for rank, folder in ((1, "rank1"), (None, "launcher")):
        argv = recorder.wrap(rank, ("python", "-c", "pass"))
        assert argv[argv.index("-o") + 1] == os.fspath(job.folder / folder / "strace.txt")
        assert argv[-4:] == ("--", "python", "-c", "pass")
        assert "trace=%network,?mmap" in [word.removesuffix(",?set_robust_list") for word in argv]
    assert len(recorder.stop().problems) >= 2, "nothing was started: both files are missing"


@pytest.mark.parametrize("calls", ["", "clone; rm -rf x", "clone,", "-o/etc/passwd"])
def test_what_is_no_list_of_calls_is_refused(calls):
    with pytest.raises(UsageError, match="no list of system calls"):
        Strace(calls=calls)
