"""In the lab VM: one shaped link that an RDMA sender and a TCP and UDP sender share. Imported by the workers there.

    init_net   v0 10.8.0.1 (rx0) --p0+
    netns T    t0 10.8.0.3       --p2+ bridge in netns sw, egress of p1 shaped --> v1 10.8.0.2 (rx1), init_net

Soft-RoCE of Linux 6.1 sends and receives in the initial network namespace only, so both RDMA ends live there, and policy routing
sends their packets out of the cables instead of through `lo`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

SENDER, RECEIVER, OTHER = "10.8.0.1", "10.8.0.2", "10.8.0.3"
DEVICES = {"rx0": "v0", "rx1": "v1"}
"""RDMA device -> network device; rx0 sends, rx1 receives."""

TRAFFIC_CLASS = 104
"""DSCP 26, what RoCE traffic has in the usual set-ups."""

ROCE_PORT = 4791
GID_INDEX = 1
"""The GID made of the IPv4 address; 0 is the link-local one."""

QUEUE_MS = 50
"""How much a full queue delays. perftest's acknowledgement timeout is 67 ms: beyond that it sends again what is only late."""

BURST = "20k"
WEIGHTS = (4500, 1500)
"""Bytes a round: RDMA's class three times the other's."""

MODULES = ("rdma_rxe", "veth", "bridge")


def run(*argv: str, text: str | None = None) -> str:
    """A command that must succeed; what it printed."""
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()[-300:]}")
    return done.stdout


def batch(lines: Sequence[str], *, netns: str | None = None) -> None:
    """Several commands of ip(8) in one process: under emulation a process costs 50 ms."""
    run("ip", *(("-n", netns) if netns else ()), "-batch", "-", text="\n".join(lines) + "\n")


def make() -> None:
    """Cables, switch, routes and RDMA devices."""
    run("modprobe", "-a", *MODULES)
    batch(["netns add sw", "netns add T"])
    batch(["link add br0 type bridge", "link set br0 up"], netns="sw")
    batch(
        [
            "link add v0 type veth peer name p0 netns sw",
            "link add v1 type veth peer name p1 netns sw",
            "link add t0 netns T type veth peer name p2 netns sw",
        ]
    )
    batch([f"link set {port} master br0 up" for port in ("p0", "p1", "p2")], netns="sw")
    batch([f"addr add {OTHER}/24 dev t0", "link set t0 up"], netns="T")
    for device in ("v0", "v1"):
        for name, value in (("accept_local", 1), ("rp_filter", 0), ("arp_ignore", 1), ("arp_announce", 2)):
            Path(f"/proc/sys/net/ipv4/conf/{device}/{name}").write_text(str(value), encoding="ascii")
    Path("/proc/sys/net/ipv4/conf/all/rp_filter").write_text("0", encoding="ascii")
    batch(
        [
            *(f"addr add {SENDER}/24 dev v0", f"addr add {RECEIVER}/24 dev v1", "link set v0 up", "link set v1 up"),
            *routes(),
            *(f"rule add pref 10 iif lo to {RECEIVER} lookup 102", f"rule add pref 10 iif lo to {SENDER} lookup 101"),
            *(f"rule add pref 11 iif lo to {OTHER} lookup 103", "rule add pref 20 lookup local", "rule del pref 0"),
        ]
    )
    offload = ("tso", "off", "gso", "off", "gro", "off")
    for device in ("v0", "v1"):
        run("ethtool", "-K", device, *offload)
    run("ip", "netns", "exec", "T", "ethtool", "-K", "t0", *offload)
    for device, network in DEVICES.items():
        run("rdma", "link", "add", device, "type", "rxe", "netdev", network)
    # Fails where the way is not whole, and fills the neighbour tables.
    run("ping", "-qc1", "-W5", "-I", SENDER, RECEIVER)
    run("ip", "netns", "exec", "T", "ping", "-qc1", "-W5", RECEIVER)


def routes() -> list[str]:
    """For `ip -batch`; a link that was down has lost those through it."""
    return [
        f"route replace {RECEIVER} dev v0 src {SENDER} table 102",
        f"route replace {SENDER} dev v1 src {RECEIVER} table 101",
        f"route replace {OTHER} dev v1 src {RECEIVER} table 103",
    ]


def shape(queue: str, rate_mbit: int) -> None:
    """Give the egress port its rate and its queue: `fifo`, `prio` (strict priority of RDMA) or `ets` (weights by DSCP)."""
    subprocess.run(("tc", "-n", "sw", "qdisc", "del", "dev", "p1", "root"), capture_output=True, check=False)
    limit = f"limit {rate_mbit * 1000 * QUEUE_MS // 8}"
    lines = [f"qdisc add dev p1 root handle 1: tbf rate {rate_mbit}mbit burst {BURST} {limit}"]
    if queue != "fifo":
        kind = f"ets bands 2 quanta {WEIGHTS[0]} {WEIGHTS[1]}" if queue == "ets" else "prio bands 2"
        match = f"ip tos {TRAFFIC_CLASS} 0xfc" if queue == "ets" else f"ip protocol 17 0xff match ip dport {ROCE_PORT} 0xffff"
        lines += [
            f"qdisc add dev p1 parent 1:1 handle 10: {kind} priomap{' 1' * 16}",
            *(f"qdisc add dev p1 parent 10:{band} handle 10{band}: bfifo {limit}" for band in (1, 2)),
            f"filter add dev p1 parent 10: protocol ip u32 match {match} flowid 10:1",
        ]
    run("tc", "-n", "sw", "-batch", "-", text="\n".join(lines) + "\n")


def drops() -> int:
    """Packets that the port's queue has dropped since `shape`: the root counts those of its children too."""
    shown = json.loads(run("tc", "-n", "sw", "-s", "-j", "qdisc", "show", "dev", "p1"))
    return next(one["drops"] for one in shown if one.get("root"))
