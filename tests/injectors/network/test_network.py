"""Each fault of the network, measured by the ranks on the cables; who is left alone; what is undone and refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("root", "netns", "veth", "package:pyroute2")

PEERS = """
import select, socket, statistics, struct
size = int(os.environ["WORLD_SIZE"])
subnet = os.environ["MASTER_ADDR"].rpartition(".")[0]
def address(other):
    return f"{subnet}.{other + 1}"
def done(other):
    return (shared / f"done-{other}").exists()
def finish():
    (shared / f"done-{rank}").touch()
    until(lambda: all(map(done, range(size))))
def datagram():
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    one.bind(("0.0.0.0", 7000))
    return one
def met(other, event):
    # A mark on the disk: the network may be cut.
    (shared / f"{event}-{rank}").touch()
    until((shared / f"{event}-{other}").exists)
def echo(one, askers=None):
    # Answers until those who ask, everybody else if not said, are done.
    one.settimeout(0.1)
    while not all(done(other) for other in askers or range(size) if other != rank):
        try:
            data, sender = one.recvfrom(70000)
            one.sendto(data, sender)
        except TimeoutError:
            pass
    finish()
def ask(one, other, count, timeout_s=1.0, size_b=32, gap_s=0.0):
    # Round-trip times, None for one without an answer.
    one.settimeout(timeout_s)
    found = []
    for number in range(count):
        before = time.monotonic()
        try:
            one.sendto(struct.pack("q", number).ljust(size_b, b"."), (address(other), 7000))
            while struct.unpack("q", one.recv(70000)[:8])[0] != number:
                pass
            found.append(time.monotonic() - before)
        except (TimeoutError, OSError):
            found.append(None)
        time.sleep(gap_s)
    return found
one = datagram()
met_all = [met(other, "ready") for other in range(size) if other != rank]
"""


def rtts(job, rank: int = 1) -> list[float | None]:
    return [None if word == "None" else float(word) for word in job.said(rank)]


def median(values) -> float:
    return sorted(values)[len(values) // 2]


ASK_0 = "if rank == 0:\n    echo(one)\nelse:\n    [say(each) for each in ask(one, 0, 20)]\n    finish()\n"


@pytest.mark.needs("tun")
def test_delay_is_added_on_the_cable_that_is_meant_and_no_other(job):
    job.run_local("network:delay,rank=1,seconds=0.1", PEERS + ASK_0, ranks=3)
    assert 0.2 <= median(rtts(job, 1)) < 0.4, job.problems()
    assert median(rtts(job, 2)) < 0.1
    (one,) = job.fired()
    assert one.rank == 1 and "packets held back" in one.detail and one.ended_ns > one.t_ns


@pytest.mark.needs("tun")
def test_jitter_spreads_the_delay(job):
    job.run_local("network:delay,rank=1,seconds=0.1,jitter_s=0.08,way=out", PEERS + ASK_0.replace("20", "40"))
    times = sorted(rtts(job, 1))
    assert 0.02 <= times[0] < 0.08 and times[30] > 0.1


@pytest.mark.needs("tun")
def test_packets_overtake_those_that_are_held_back(job):
    code = """
if rank == 0:
    one.settimeout(3)
    numbers = []
    try:
        while len(numbers) < 300:
            numbers.append(struct.unpack("q", one.recv(100))[0])
    except TimeoutError:
        pass
    say(len(numbers), sum(now < before for before, now in zip(numbers, numbers[1:])))
    finish()
else:
    for number in range(300):
        one.sendto(struct.pack("q", number), (address(0), 7000))
        time.sleep(0.001)
    finish()
"""
    job.run_local("network:reorder,rank=1,percent=20,seconds=0.05", PEERS + code)
    count, late = map(int, job.said(0)[0].split())
    assert count == 300 and late > 10


@pytest.mark.parametrize("by", [pytest.param("nft", marks=pytest.mark.needs("nftables")), "bpf"])
def test_so_many_packets_are_dropped_as_were_asked_for(job, by):
    code = """
if rank == 0:
    count = 0
    one.settimeout(0.2)
    while not done(1):
        try:
            one.recv(100)
            count += 1
        except TimeoutError:
            pass
    say(count)
    finish()
else:
    for number in range(3000):
        one.sendto(b"x", (address(0), 7000))
        if number % 50 == 0:
            time.sleep(0.002)
    time.sleep(0.5)
    finish()
"""
    job.run_local(f"network:drop,rank=1,percent=10,way=out,by={by}", PEERS + code)
    arrived = int(job.said(0)[0])
    # Five standard deviations of a binomial with n=3000, p=0.1 are 82.
    assert 3000 * 0.9 - 82 <= arrived <= 3000 * 0.9 + 82, job.problems()
    (one,) = job.fired()
    assert one.rank == 1 and int(one.detail.split()[0]) == pytest.approx(3000 - arrived, abs=5)


TRANSFER = """
if rank == 0:
    server = socket.create_server(("0.0.0.0", 7001))
    peer, _ = server.accept()
    got, before = 0, time.monotonic()
    while data := peer.recv(1 << 20):
        got += len(data)
    say(got * 8 / (time.monotonic() - before) / 1e6)
    finish()
else:
    give_up = time.monotonic() + 60
    while True:
        try:
            peer = socket.create_connection((address(0), 7001))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < give_up
            time.sleep(0.05)
    peer.sendall(bytes(5_000_000))
    peer.shutdown(socket.SHUT_WR)
    finish()
"""


@pytest.mark.needs("tc")
@pytest.mark.parametrize("by", ["tbf", "htb"])
def test_no_more_passes_than_the_bandwidth_that_was_asked_for(job, by):
    job.run_local(f"network:bandwidth,rank=1,mbit=20,by={by}", PEERS + TRANSFER)
    assert 8 < float(job.said(0)[0]) < 23, job.problems()
    (one,) = job.fired()
    assert one.rank == 1 and int(one.detail.split()[0]) > 5_000_000


@pytest.mark.needs("nftables")
def test_a_partition_cuts_ranks_off_from_the_others_but_not_from_each_other(job):
    code = """
import threading
if rank in (0, 3):
    echo(one, (1, 2))
else:
    other = {1: 2, 2: 1}[rank]
    mate = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    mate.bind(("0.0.0.0", 7002))
    met(other, "mate")
    say("cut" if ask(one, 0, 2) == [None, None] else "joined")
    mate.sendto(b"hello", (address(other), 7002))
    mate.settimeout(5)
    say(mate.recv(10).decode())
    finish()
"""
    job.run_local("network:partition,rank=1+2", PEERS + code, ranks=4)
    assert job.said(1) == job.said(2) == ["cut", "hello"]
    assert {one.rank for one in job.fired()} == {1, 2}


@pytest.mark.needs("nftables")
def test_a_partition_one_way_lets_the_other_way_through(job):
    code = """
one.settimeout(1.5)
one.sendto(str(rank).encode(), (address(1 - rank), 7000))
try:
    say(one.recv(10).decode())
except TimeoutError:
    say("nothing")
finish()
"""
    job.run_local("network:partition,rank=1,peers=0,way=out", PEERS + code)
    assert (job.said(0), job.said(1)) == (["nothing"], ["0"])


@pytest.mark.needs("nftables")
def test_a_black_hole_swallows_all_for_its_time(job):
    code = """
if rank == 0:
    echo(one)
else:
    until(lambda: ask(one, 0, 1, timeout_s=0.3) == [None])
    say("gone")
    until(lambda: ask(one, 0, 1, timeout_s=0.3) != [None])
    say("back")
    finish()
"""
    job.run_local("network:blackhole,rank=1,after_s=2,for_s=2", PEERS + code)
    assert job.said(1) == ["gone", "back"], job.problems()
    (one,) = job.fired()
    assert one.ended_ns - one.t_ns >= 1.5e9


def test_a_flapping_cable_takes_the_rank_s_carrier(job):
    code = """
if rank == 0:
    echo(one)
else:
    carrier = lambda: Path("/sys/class/net/dtp0/carrier")
    def up():
        import fcntl
        flags = fcntl.ioctl(one, 0x8913, struct.pack("16sH14x", b"dtp0", 0))
        return bool(struct.unpack("16sH14x", flags)[1] & 0x40)
    for _ in range(2):
        until(lambda: not up())
        until(up)
        say("flap")
    until(lambda: ask(one, 0, 1, timeout_s=0.5) != [None])
    say("back")
    finish()
"""
    job.run_local("network:flap,rank=1,down_s=0.5,up_s=1,count=2,after_s=1", PEERS + code)
    assert job.said(1) == ["flap", "flap", "back"], job.problems()
    assert "2 times" in job.fired()[0].detail


def test_with_a_wrong_mtu_small_packets_arrive_and_large_ones_vanish(job):
    code = """
if rank == 0:
    echo(one)
else:
    say(ask(one, 0, 3, size_b=32).count(None), ask(one, 0, 3, size_b=4000).count(None))
    finish()
"""
    job.run_local("network:mtu,rank=1,bytes=9000", PEERS + code)
    assert job.said(1) == ["0 3"], job.problems()
    assert "3 lost" in job.fired()[0].detail


def test_two_faults_on_one_cable_act_together(job):
    job.run_local(["network:delay,rank=1,seconds=0.1,way=out", "network:bandwidth,rank=1,mbit=50"], PEERS + ASK_0)
    assert 0.1 <= median(rtts(job, 1)) < 0.3
    assert job.fired(0)[0].rank == job.fired(1)[0].rank == 1


def test_a_fault_that_meets_no_packet_has_not_fired(job):
    record = job.run_local("network:blackhole,rank=1", "pass")
    (one,) = record.injected
    assert one.fired == () and "no packet met it" in one.problems[0]


TORCH = """
import torch
import torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
tensor = torch.ones(500_000)
dist.all_reduce(torch.ones(1))
before = time.monotonic()
dist.all_reduce(tensor)
say(time.monotonic() - before, tensor[0].item())
dist.destroy_process_group()
"""


@pytest.mark.needs("gloo", "tc")
def test_gloo_feels_the_bandwidth_of_its_cable(job):
    record = job.run_local("network:bandwidth,rank=1,mbit=16", TORCH)
    assert [one.exit_code for one in record.exits] == [0, 0], job.log("rank1/stderr.log")
    took_s, total = map(float, job.said(1)[0].split())
    # 2 MB to and fro at 2 MB/s: a second at least, less the bucket.
    assert took_s > 0.7 and total == 2


@pytest.mark.needs("gloo", "tun")
def test_ranks_of_torchrun_are_moved_apart_and_still_find_their_agent(job):
    job.command("say(os.readlink('/proc/self/ns/net'))\n" + TORCH)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(job.shared / "rank.py"),
    ]
    out, err = job.cli("network:delay,rank=1,seconds=0.05", "--", *torchrun).communicate(timeout=120)
    assert len({job.said(0)[0], job.said(1)[0], str(Path("/proc/self/ns/net").readlink())}) == 3, err
    assert float(job.said(1)[1].split()[0]) > 0.1
    (fault,) = json.loads(out)["faults"]
    assert [one["rank"] for one in fault["fired"]] == [1]


def left() -> list[str]:
    folder = Path("/run/netns")
    return sorted(one.name for one in folder.iterdir()) if folder.exists() else []


def test_nothing_is_left_after_the_job_nor_when_a_victim_dies(job):
    before = left()
    record = job.run_local("network:blackhole,rank=1", PEERS + "if rank == 1:\n    os.kill(os.getpid(), 9)\n")
    assert record.exits[1].signal == 9
    assert set(left()) <= set(before) and not job.processes()


def test_a_killed_harness_leaves_no_namespace(job, killed, eventually):
    before, made = set(left()), set()
    job.command("say('up')\nuntil(lambda: False)")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(job.shared / "rank.py"),
    ]

    def up() -> bool:
        made.update(set(left()) - before)
        return bool(job.said(0) and job.said(1))

    killed(["network:blackhole,rank=1", "--", *torchrun], up)
    assert len(made) >= 3
    # Those of tests beside this one go too, when they are done.
    eventually(lambda: not made & set(left()), "the namespaces go")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("network:dely,rank=1", "did you mean delay"),
        ("network:delay,seconds=0", "not above 0"),
        ("network:drop,percent=101", "at most 100"),
        ("network:mtu,bytes=1500", "everybody has"),
        ("network:delay,seconds=0.1,nth=3", "cannot aim by nth"),
        ("network:partition", "two sides"),
        ("network:partition,rank=1,peers=1", "both sides"),
        ("network:blackhole,rank=1", "cannot be told apart"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_started(job, fault, words):
    assert words in job.refused(fault)
