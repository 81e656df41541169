"""RoCEv2 frames as they arrive at a rank, at the rate that was asked for; who is left alone; what is undone and refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtprobe import doctor
from dtprobe.catalog import PACKAGE

HERE = PACKAGE.parent / "injectors" / "rdma-frames"
frames = pytest.mark.needs("root", "netns", "veth", "package:pyroute2", "package:scapy")

COUNT = """
import socket
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23)
one.bind(("", 4791))
one.settimeout(0.5)
got, opcodes, qps = 0, {}, set()
def take(seconds):
    global got
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        try:
            data = one.recv(2048)
        except TimeoutError:
            continue
        got += 1
        opcodes[data[0]] = opcodes.get(data[0], 0) + 1
        qps.add(int.from_bytes(data[5:8], "big"))
"""


OWN = "os.stat('/proc/self/ns/net').st_ino"


def there(number: int) -> bool:
    """Whether the network namespace of that number has a name on this machine."""
    folder = Path("/run/netns")
    return folder.is_dir() and number in [one.stat().st_ino for one in folder.iterdir()]


def kept(job, rank: int, index: int = 0) -> list:
    """The evidence: frames that arrived, as scapy understands them."""
    from scapy.contrib.roce import BTH
    from scapy.utils import rdpcap

    found = rdpcap(str(job.record.folder / "faults" / f"rdma-frames-{index:03}-rank{rank}.pcap"))
    for frame in found:
        assert frame[BTH].icrc == int.from_bytes(frame[BTH].compute_icrc(b""), "big")
    return list(found)


@frames
@pytest.mark.parametrize("by", ["socket", pytest.param("tcpreplay", marks=pytest.mark.needs("tcpreplay"))])
def test_writes_arrive_at_the_rank_that_is_meant_at_the_rate_that_was_asked_for(job, by):
    code = COUNT + "take(3)\nsay(got, sorted(opcodes), sorted(qps))\n"
    job.run_local(f"rdma-frames:write,rank=1,rate=500,bytes=2100,qp=99,by={by}", code)
    assert job.said(0) == ["0 [] []"]
    got, rest = job.said(1)[0].split(" ", 1)
    assert rest == "[6, 7, 8] [99]" and 300 < int(got) < 3000
    (one,) = job.fired()
    assert one.rank == 1 and one.ended_ns - one.t_ns >= 2.9e9 and f"sent by {by}" in one.detail
    sent, arrived = int(one.detail.split()[0]), int(one.detail.split(";")[1].split()[0])
    assert int(got) <= arrived <= sent and arrived > 0.9 * sent
    asked_s = (one.ended_ns - one.t_ns) / 1e9
    assert 0.5 * 500 * asked_s < sent < 1.1 * 500 * asked_s + 50


@frames
def test_a_message_is_cut_and_sealed_as_the_standard_says(job):
    from scapy.contrib.roce import BTH
    from scapy.layers.inet import IP, UDP

    job.run_local(
        "rdma-frames:write,rank=0,rate=200,bytes=2101,mtu=1024", COUNT + "until(lambda: take(0.1) or got > 20)", ranks=1
    )
    found = {frame[BTH].opcode: frame for frame in kept(job, 0)}
    assert sorted(found) == [6, 7, 8]
    assert [len(bytes(found[code][BTH].payload)) for code in (6, 7, 8)] == [16 + 1024, 1024, 53 + 3]
    assert int.from_bytes(bytes(found[6][BTH].payload)[12:16], "big") == 2101
    assert [(found[code][BTH].padcount, found[code][BTH].ackreq, found[code][BTH].psn) for code in (6, 7, 8)] == [
        (0, 0, 0),
        (0, 0, 1),
        (3, 1, 2),
    ]
    assert found[6][UDP].dport == 4791 and found[6][IP].tos & 3 == 2


@frames
def test_congestion_notifications_arrive_from_their_time_on_and_as_long_as_they_are_meant_to(job):
    from scapy.contrib.roce import BTH

    code = """
began = time.monotonic()
until(lambda: take(0.1) or got)
first = time.monotonic() - began
until(lambda: (before := got, take(1.5), got == before)[2])
say(first, sorted(opcodes), sorted(qps))
"""
    job.run_local("rdma-frames:cnp,rank=1,rate=100,qp=7,after_s=1,for_s=1", "if rank == 0:\n    sys.exit()\n" + COUNT + code)
    first, rest = job.said(1)[0].split(" ", 1)
    assert float(first) > 0.5 and rest == "[129] [7]"
    assert {(frame[BTH].opcode, frame[BTH].becn, frame[BTH].dqpn) for frame in kept(job, 1)} == {(129, 1, 7)}
    (one,) = job.fired()
    assert "congestion notifications" in one.detail and 0.5e9 < one.ended_ns - one.t_ns < 20e9


@frames
@pytest.mark.needs("tc")
def test_frames_share_the_cable_with_its_other_faults(job):
    """1 Mbit/s lets through about 120 frames of a kilobyte in a second."""
    faults = ["rdma-frames:write,rank=1,rate=2000,bytes=1024,by=socket", "network:bandwidth,rank=1,mbit=1,way=in"]
    job.run_local(faults, COUNT + "take(3)\nsay(got)")
    assert 50 < int(job.said(1)[0]) < 1500
    assert job.fired(0)[0].rank == 1 and job.fired(1)


@frames
def test_a_victim_that_dies_leaves_nothing(job):
    job.run_local("rdma-frames:cnp,rank=1,rate=100", COUNT + f"say({OWN})\ntake(1)\nos.kill(os.getpid(), 9)")
    assert job.where() == [(1, None)] and not job.processes()
    assert not there(int(job.said(0)[0])) and not there(int(job.said(1)[0]))


@frames
def test_a_killed_harness_leaves_no_sender(job, killed, eventually):
    code = f"(shared / 'new').write_text(str({OWN}))\n(shared / 'new').rename(shared / 'up')\nuntil(lambda: False)"
    job.command(code)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(job.shared / "rank.py")]
    seen = []
    killed(
        ["rdma-frames:write,rate=100", "--", *argv],
        lambda: (job.shared / "up").exists() and (seen or seen.append(there(int((job.shared / "up").read_text()))) or seen),
    )
    assert seen == [True] and not there(int((job.shared / "up").read_text()))


@frames
def test_a_command_whose_ranks_cannot_be_told_apart_is_refused(job):
    assert "cannot be told apart" in job.refused("rdma-frames:write")


@pytest.mark.skipif(doctor.capability("rdma") is None, reason="there is an RDMA device")
def test_a_load_without_a_device_is_refused_with_the_reason(job):
    assert "no RDMA device in /sys/class/infiniband" in job.refused("rdma-frames:load,seconds=5")


STAND_IN = """#!{python}
import socket, sys, time
port = int(next(word for word in sys.argv if word.startswith("--port=")).partition("=")[2])
if sys.argv[-1] == "127.0.0.1":
    with socket.create_connection(("127.0.0.1", port)):
        time.sleep(1)
    print(" #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]")
    print(" 65536      5120             3.10               2.95                 0.005")
else:
    server = socket.create_server(("127.0.0.1", port))
    server.accept()[0].recv(1)
"""


def test_a_load_is_measured_and_ended_early_by_the_job_s_end(tmp_path):
    """With a stand-in for ib_write_bw: there is no device here. The helper runs by itself, as the injector starts it."""
    program = tmp_path / "ib_write_bw"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    part = {"index": 0, "on": False, "device": "mlx5_0", "seconds": 5, "gbits": 3.0, "port": _free_port()}
    (tmp_path / "config").write_text(json.dumps({"parts": [part]}))
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(PACKAGE.parent)}
    helper = subprocess.Popen(
        [sys.executable, str(HERE / "load.py"), str(tmp_path / "config")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
        text=True,
    )
    assert helper.stdin is not None and helper.stdout is not None
    try:
        assert json.loads(helper.stdout.readline())["kind"] == "ready"
        helper.stdin.write('{"do": "begin", "index": 0, "rank": 0}\n{"do": "begin", "index": 0, "rank": 1}\n')
        helper.stdin.flush()
        fired = json.loads(helper.stdout.readline())
        assert fired["kind"] == "fired" and "--rate_limit=3 --rate_limit_type=SW" in fired["detail"]
        ended = json.loads(helper.stdout.readline())
        assert ended["number"] == fired["number"] and "2.95 Gbit/s on average" in ended["detail"]
        helper.stdin.write('{"do": "stop"}\n')
        helper.stdin.flush()
        assert helper.wait(60) == 0
    finally:
        helper.kill()
        helper.communicate()


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("rdma-frames:wirte", "did you mean write"),
        ("rdma-frames:write,rate=0", "rate=0 is not between"),
        ("rdma-frames:write,bytes=0", "bytes=0 is not between"),
        ("rdma-frames:write,mtu=9000", "mtu=9000 is unknown"),
        ("rdma-frames:cnp,qp=16777216", "is not between"),
        ("rdma-frames:cnp,bytes=5", "no parameter 'bytes'"),
        ("rdma-frames:load,seconds=601", "not between 1 and 600"),
        ("rdma-frames:load,rank=1", "leave rank and for_s out"),
        ("rdma-frames:write,nth=2", "cannot aim by nth"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_started(job, fault, words):
    assert words in job.refused(fault)
