from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtprobe.probes import sockets, syscalls
from dtprobe.probes.liveness import Finding, Life, Pulse

pytestmark = pytest.mark.needs("linux", "ptrace")

START = "import ctypes, os, socket, subprocess, sys, threading, time\nprint('ready', flush=True)\n"


@pytest.fixture
def process() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a process of that Python code, and returns when the code begins."""
    made: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", START + code]
        made.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True))
        assert made[-1].stdout is not None
        made[-1].stdout.readline()
        return made[-1]

    yield start
    for one in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        one.communicate()


def looked_at(pid: int, until: Callable[[Finding], bool], timeout_s: float = 30) -> Finding:
    """What repeated looks say, once that holds."""
    pulse, give_up = Pulse(pid), time.monotonic() + timeout_s
    while True:
        time.sleep(0.5)
        found = pulse.look(time.monotonic())
        if until(found):
            return found
        assert time.monotonic() < give_up, found


@pytest.mark.parametrize(
    ("code", "life", "told"),
    [
        ("while True: sum(range(1000))", Life.WORKS, "computes"),
        ("subprocess.run([sys.executable, '-c', 'while True: pass'])", Life.WORKS, "computes"),
        ("time.sleep(600)", Life.SLEEPS, "asleep for 5"),
        ("subprocess.run(['sleep', '600'])", Life.SLEEPS, "waits for its child"),
        ("ctypes.CDLL(None).sleep(600)", Life.SLEEPS, "asleep for 600.0 s"),
        ("sys.stdin.read()", Life.BLOCKED, "blocked in read"),
        ("threading.Event().wait()", Life.BLOCKED, "blocked in futex"),
        ("threading.Event().wait(600)", Life.BLOCKED, "blocked in futex"),
        ("a, b = socket.socketpair(); a.recv(1)", Life.BLOCKED, "blocked in recvfrom"),
        ("while True: ctypes.CDLL(None).usleep(10000)", Life.BLOCKED, "polls in native code"),
        ("os.kill(os.getpid(), 19)", Life.STOPPED, "stopped (state T)"),
        ("a, b = os.pipe()\nwhile True:\n    os.write(b, bytes(9000)); os.read(a, 9000); time.sleep(.1)", Life.WORKS, "KiB/s"),
    ],
)
def test_what_a_process_does_is_told(process, code, life, told):
    found = looked_at(process(code).pid, lambda one: one.life is life and told in one.text)
    assert found.alive is (life in (Life.WORKS, Life.SLEEPS)) and found.dead is (life is Life.STOPPED)


def test_only_pythons_own_sleep_tells_when_it_ends_and_gives_the_interpreter_lock_back(process):
    own = looked_at(process("time.sleep(600)").pid, lambda one: one.life is Life.SLEEPS)
    assert not own.native_sleep and 500 < own.sleep_s < 600
    assert looked_at(process("ctypes.CDLL(None).sleep(600)").pid, lambda one: one.life is Life.SLEEPS).native_sleep


def test_a_call_to_a_file_system_is_work_and_one_on_a_pipe_is_not(process, tmp_path: Path):
    code = f"""
file = open({str(tmp_path / "synced")!r}, "wb")
while True:
    file.write(b"x"); file.flush(); os.fsync(file.fileno())
"""
    looked_at(process(code).pid, lambda one: one.life in (Life.FILES, Life.WORKS))
    pid = process("sys.stdin.read()").pid
    looked_at(pid, lambda one: one.life is Life.BLOCKED)
    call = syscalls.call_of(pid, pid)
    assert call is not None and call.name == "read" and not call.file


def test_how_long_a_blocked_process_has_been_quiet_is_counted_and_its_threads_with_it(process):
    pid = process("threading.Event().wait()").pid
    found = looked_at(pid, lambda one: one.life is Life.BLOCKED and one.quiet_s >= 1.5)
    assert found.quiet_s < 30
    pulse = Pulse(pid)
    pulse.look(10.0)
    pulse.look(14.0)
    assert pulse.thread_quiet_s(pid, 15.0) == 5.0 and pulse.thread_quiet_s(pid + 1, 15.0) == 0.0


def test_a_process_that_ended_and_one_that_took_its_pid_are_told_apart(process):
    child = process("time.sleep(600)")
    pulse = Pulse(child.pid)
    assert not pulse.look(0.0).dead
    pulse.start = 1
    assert pulse.look(1.0).life is Life.ENDED
    child.kill()
    child.wait()
    assert Pulse(child.pid).look(2.0).life is Life.ENDED


@pytest.mark.skipif(not any(Path(one, "ss").exists() for one in os.environ["PATH"].split(":")), reason="needs ss (iproute2)")
def test_a_process_that_receives_over_tcp_is_at_work(process):
    code = """
server = socket.create_server(("127.0.0.1", 0))
def feed():
    try:
        with socket.create_connection(server.getsockname()) as out:
            while True:
                out.sendall(bytes(20000)); time.sleep(0.1)
    except OSError:
        pass
if os.fork() == 0:
    feed()
    os._exit(0)
taken, _ = server.accept()
while taken.recv(1 << 16):
    pass
"""
    pid = process(code).pid
    pulse, give_up = Pulse(pid), time.monotonic() + 60
    pulse.look(time.monotonic())
    while True:
        time.sleep(0.6)
        found = pulse.look(time.monotonic())
        moved = sockets.moved(os.environ)
        assert isinstance(moved, dict) and moved.get(pid, 0) > 0
        # Where the look alone does not see it (the child here is a part of the job and shows its own writes).
        pulse.finding = Finding(life=Life.BLOCKED, text="blocked", quiet_s=found.quiet_s)
        pulse.sockets(moved, time.monotonic())
        if pulse.finding.life is Life.WORKS:
            break
        assert time.monotonic() < give_up
    assert "over TCP" in pulse.finding.text
