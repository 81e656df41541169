"""Each fault of the store's proxy, seen by the rank behind it and by the store; who is left alone; what is undone and refused."""

from __future__ import annotations

import json
import random
import sys

import pytest

from dtprobe import catalog
from dtprobe.catalog import load_module

WIRE = load_module(catalog.PACKAGE.parent / "injectors/store/wire.py", "_test_store_wire")

STORE = """
import json, socket, threading
def text(value):
    return len(value).to_bytes(8, "little") + value
def set_(key, value):
    return b"\\x01" + text(key) + text(value)
def get(key):
    return b"\\x03" + text(key)
class Store:
    # A server at MASTER_PORT that notes what it gets, and answers each piece with "ok".
    def __init__(self):
        self.got = []
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        server.listen()
        threading.Thread(target=self.accept, args=(server,), daemon=True).start()
    def accept(self, server):
        while True:
            threading.Thread(target=self.serve, args=(server.accept()[0],), daemon=True).start()
    def serve(self, one):
        try:
            while data := one.recv(65536):
                self.got.append(data)
                one.sendall(b"ok")
        except OSError as error:
            self.got.append(type(error).__name__.encode())
def connected():
    give_up = time.monotonic() + 60
    while True:
        try:
            one = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.settimeout(60)
            return one
        except ConnectionRefusedError:
            if time.monotonic() > give_up:
                raise
            refused.append(time.monotonic())
            time.sleep(0.02)
def exact(one, count):
    got = b""
    while len(got) < count and (more := one.recv(count - len(got))):
        got += more
    return got
refused = []
if rank == 0:
    store = Store()
    until(lambda: all((shared / f"done-{other}").exists() for other in range(1, int(os.environ["WORLD_SIZE"]))))
    say(b"".join(store.got).hex())
else:
    work()
    (shared / f"done-{rank}").touch()
"""


def ranks(work: str) -> str:
    body = "".join(f"    {line}\n" for line in work.strip().splitlines())
    return f"def work():\n{body}{STORE}"


def got(job) -> bytes:
    """What reached the store."""
    return bytes.fromhex(job.said(0)[0])


def words(*values: bytes) -> bytes:
    return b"".join(b"\x01" + (1).to_bytes(8, "little") + b"k" + len(one).to_bytes(8, "little") + one for one in values)


def test_a_delayed_message_comes_late_and_only_the_rank_s_that_is_meant(job):
    work = """
one = connected()
for _ in range(3):
    before = time.monotonic()
    one.sendall(get(b"k"))
    exact(one, 2)
    say(time.monotonic() - before)
"""
    job.run_local("store:delay,rank=1,nth=2,seconds=0.8", ranks(work), ranks=3)
    first, second, third = map(float, job.said(1))
    assert second >= 0.8 > first and third < 0.8
    assert max(map(float, job.said(2))) < 0.8
    (one,) = job.fired()
    assert (one.rank, one.call, one.nth) == (1, "get", 2) and one.ended_ns - one.t_ns >= 0.8e9


def test_the_nth_message_of_a_kind_is_lost_and_no_other(job):
    work = """
one = connected()
one.sendall(get(b"k") + set_(b"k", b"1") + set_(b"k", b"2") + get(b"k") + set_(b"k", b"3"))
one.shutdown(socket.SHUT_WR)
while one.recv(100):
    pass
"""
    job.run_local("store:drop,rank=1,op=set,nth=2", ranks(work))
    get = b"\x03" + (1).to_bytes(8, "little") + b"k"
    assert got(job) == get + words(b"1") + get + words(b"3")
    assert [(one.rank, one.call, one.nth) for one in job.fired()] == [(1, "set", 2)]


def test_a_reset_reaches_rank_and_store(job):
    work = """
one = connected()
one.sendall(get(b"k"))
exact(one, 2)
one.sendall(get(b"l"))
try:
    say(one.recv(1))
except ConnectionResetError:
    say("reset")
one = connected()
one.sendall(get(b"k"))
say(exact(one, 2).decode())
"""
    job.run_local("store:reset,rank=1,nth=2", ranks(work))
    assert job.said(1) == ["reset", "ok"]
    assert b"ConnectionResetError" in got(job)
    assert job.where() == [(1, 2)]


def test_a_sliced_message_arrives_whole_in_pieces(job):
    work = """
one = connected()
one.sendall(set_(b"k", b"0123456789"))
for _ in range(10):
    exact(one, 2)
say("ten answers")
"""
    job.run_local("store:slice,rank=1,bytes=3,pause_s=0.05", ranks(work))
    assert got(job) == words(b"0123456789") and job.said(1) == ["ten answers"]
    assert "28 bytes in 10 pieces" in job.fired()[0].detail


def test_a_half_open_connection_says_nothing_until_its_time_is_over(job):
    work = """
one = connected()
one.sendall(get(b"k"))
exact(one, 2)
one.sendall(get(b"k"))
one.settimeout(1)
try:
    say(one.recv(1))
except TimeoutError:
    say("nothing")
one.settimeout(60)
try:
    say(one.recv(1))
except ConnectionResetError:
    say("reset")
"""
    job.run_local("store:half_open,rank=1,nth=2,for_s=3", ranks(work))
    assert job.said(1) == ["nothing", "reset"]
    assert len(got(job)) < 40
    (one,) = job.fired()
    assert one.nth == 2 and one.ended_ns is not None


def test_a_refused_rank_is_let_in_later(job):
    work = """
one = connected()
one.sendall(get(b"k"))
say(exact(one, 2).decode(), bool(refused) and refused[-1] - refused[0])
"""
    job.run_local("store:refuse,rank=1,seconds=1", ranks(work))
    answer, took_s = job.said(1)[0].split()
    assert answer == "ok" and float(took_s) > 0.5
    (one,) = job.fired()
    assert one.rank == 1 and one.ended_ns - one.t_ns >= 1e9


def test_a_rank_at_work_is_cut_off_and_refused_from_its_time_on(job):
    work = """
one = connected()
try:
    while True:
        one.sendall(get(b"k"))
        exact(one, 2)
        time.sleep(0.05)
except OSError as error:
    say(type(error).__name__)
one = connected()
one.sendall(get(b"k"))
say(exact(one, 2).decode(), len(refused) > 1)
"""
    job.run_local("store:refuse,rank=1,seconds=1,after_s=1", ranks(work))
    assert job.said(1)[0] in ("ConnectionResetError", "BrokenPipeError") and job.said(1)[1] == "ok True"


def test_chance_is_repeated_by_the_seed(job):
    work = """
one = connected()
for _ in range(60):
    one.sendall(get(b"k"))
    exact(one, 2)
"""
    met = []
    for seed in (5, 5, 6):
        for file in job.shared.glob("done-*"):
            file.unlink()
        job.run_local("store:delay,rank=1,probability=0.3,seconds=0.001", ranks(work), seed=seed)
        met.append(job.where())
    assert met[0] == met[1] != met[2] and 5 < len(met[0]) < 35


TORCH = """
import torch
import torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
before = time.monotonic()
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
say("done")
"""


@pytest.mark.needs("gloo")
def test_a_real_process_group_meets_its_store_through_the_proxy(job):
    record = job.run_local("store:delay,rank=1,op=set,nth=1,seconds=1", TORCH)
    assert [one.exit_code for one in record.exits] == [0, 0], job.log("rank1/stderr.log")
    (one,) = job.fired()
    assert (one.rank, one.call, one.nth) == (1, "set", 1) and one.ended_ns - one.t_ns >= 1e9


@pytest.mark.needs("gloo")
def test_under_torchrun_the_agent_s_store_is_reached_from_rank_0_too(job):
    job.command(TORCH)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(job.shared / "rank.py"),
    ]
    job.run("store:delay,op=set,nth=1,seconds=0.5", torchrun)
    assert job.said(0) == job.said(1) == ["done"], job.log()
    assert sorted(job.where()) == [(0, 1), (1, 1)]


def test_rank_0_that_is_the_store_s_own_host_is_said_not_to_be_reached(job):
    record = job.run_local("store:drop,rank=0,nth=1", "pass")
    (one,) = record.injected
    assert one.fired == () and "rank 0 is the store's own host" in one.problems[0]


def test_a_rank_that_never_talks_to_its_store_is_said(job):
    record = job.run_local("store:drop,rank=1,nth=1", "pass")
    (one,) = record.injected
    assert one.fired == () and "not the one of MASTER_ADDR" in one.problems[0]


VICTIM = """
one = connected()
one.sendall(get(b"k"))
(shared / f"waits-{rank}").touch()
until(lambda: False)
"""


def test_a_victim_that_dies_leaves_nothing(job):
    work = VICTIM.replace("until(lambda: False)", "(shared / f'done-{rank}').touch()\nos.kill(os.getpid(), 9)")
    record = job.run_local("store:half_open,rank=1", ranks(work))
    assert record.exits[1].signal == 9 and job.where() == [(1, 1)]
    assert job.fired()[0].ended_ns is not None and not job.processes()


def test_a_killed_harness_leaves_no_proxy(job, killed):
    code = "os.environ['MASTER_ADDR']\n" + ranks(VICTIM)
    launcher = job.launching(sys.executable, str(job.shared / "rank.py"))
    job.command(code)
    job.extra |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    killed(["store:half_open,rank=1", "--", *launcher], (job.shared / "waits-1").exists)


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("store:dealy,rank=1", "did you mean delay"),
        ("store:delay,rank=1", "needs seconds"),
        ("store:delay,seconds=0", "not between 0 and 600"),
        ("store:slice,bytes=0", "less than 1"),
        ("store:refuse,seconds=1,nth=2", "not a message"),
        ("store:drop,node=1", "cannot aim by node"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_started(job, fault, words):
    assert words in job.refused(fault)


def test_messages_are_cut_alike_however_the_bytes_arrive():
    def text(value: bytes) -> bytes:
        return len(value).to_bytes(8, "little") + value

    whole = [
        ("validate", b"\x00\xce\xf7\x85<"),
        ("ping", b"\x0d1234"),
        ("set", b"\x01" + text(b"/k") + text(b"v" * 300)),
        ("wait", b"\x06" + (2).to_bytes(8, "little") + text(b"a") + text(b"bc")),
        ("multi_set", b"\x0b" + (2).to_bytes(8, "little") + text(b"a") + text(b"1") + text(b"b") + text(b"")),
        ("num_keys", b"\x07"),
        ("compare_set", b"\x02" + text(b"c") + text(b"") + text(b"d")),
        ("add", b"\x04" + text(b"n") + (3).to_bytes(8, "little")),
    ]
    stream = b"".join(message for _, message in whole)
    dice = random.Random(3)
    for _ in range(50):
        cuts = sorted(dice.sample(range(1, len(stream)), 6))
        messages = WIRE.Messages()
        found = [one for at, to in zip([0, *cuts], [*cuts, len(stream)], strict=True) for one in messages.feed(stream[at:to])]
        assert found == whole


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"\x01" + b"\xff" * 30, b"\x0b" + b"\xff" * 8, b"\xee"])
def test_bytes_of_another_protocol_pass_as_they_come(data):
    assert WIRE.Messages().feed(data) == [("other", data)]


def test_by_command_line_a_run_says_what_fired(job):
    job.command(ranks("one = connected()\none.sendall(get(b'k'))\nexact(one, 2)"))
    job.extra |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    process = job.cli("store:delay,rank=1,seconds=0.1", "--", *job.launching(sys.executable, str(job.shared / "rank.py")))
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    (fault,) = json.loads(out)["faults"]
    assert fault["count"] == 1 and fault["fired"][0]["call"] == "get"
