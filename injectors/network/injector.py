"""Faults of the network between ranks: each rank in a namespace of its own, and its cable too slow, too long, broken or cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dtprobe import doctor
from dtprobe.catalog import load_module
from dtprobe.errors import Unavailable
from dtprobe.inject import Injector

Way = Literal["both", "out", "in"]
"""From the rank's point of view."""

apart = load_module(Path(__file__).with_name("apart.py"), "_dtprobe_network_apart")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low < value <= high:
        raise ValueError(f"{name}={value:g} is not above {low:g} and at most {high:g}")


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """The rank's cable carries at most `mbit` Mbit/s, by a token bucket (tbf) or a class (htb)."""

    mbit: float
    by: Literal["tbf", "htb"] = "tbf"
    way: Way = "both"

    def __post_init__(self) -> None:
        _within("mbit", self.mbit, 0, 100_000)


@dataclass(frozen=True, kw_only=True)
class Delay:
    """Each packet takes `seconds` longer, give or take `jitter_s`; without jitter none overtakes another."""

    seconds: float
    jitter_s: float = 0.0
    way: Way = "both"

    def __post_init__(self) -> None:
        _within("seconds", self.seconds, 0, 60)
        if not 0 <= self.jitter_s <= self.seconds:
            raise ValueError(f"jitter_s={self.jitter_s:g} is not between 0 and seconds={self.seconds:g}")


@dataclass(frozen=True, kw_only=True)
class Reorder:
    """`percent` of the packets are held back for `seconds`, and the others overtake them."""

    percent: float
    seconds: float = 0.005
    way: Way = "both"

    def __post_init__(self) -> None:
        _within("percent", self.percent, 0, 100)
        _within("seconds", self.seconds, 0, 60)


@dataclass(frozen=True, kw_only=True)
class Drop:
    """`percent` of the packets are lost, by nftables (nft) or a classifier (bpf)."""

    percent: float
    by: Literal["nft", "bpf"] = "nft"
    way: Way = "both"

    def __post_init__(self) -> None:
        _within("percent", self.percent, 0, 100)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The ranks that are meant and the `peers` (all other ranks, where not said) lose each other's packets; one way or both."""

    peers: tuple[int, ...] = ()
    way: Way = "both"

    def __post_init__(self) -> None:
        if self.peers and min(self.peers) < 0:
            raise ValueError(f"peers holds {min(self.peers)}: ranks count from 0")


@dataclass(frozen=True, kw_only=True)
class Blackhole:
    """Everything on the rank's cable vanishes, and nobody is told: the link stays up."""

    way: Way = "both"


@dataclass(frozen=True, kw_only=True)
class Flap:
    """The cable is pulled for `down_s` and back for `up_s`, `count` times: the rank's device loses its carrier."""

    down_s: float
    up_s: float = 1.0
    count: int = 1

    def __post_init__(self) -> None:
        _within("down_s", self.down_s, 0, 600)
        _within("up_s", self.up_s, 0, 600)
        _within("count", self.count, 0, 1000)


@dataclass(frozen=True, kw_only=True)
class Mtu:
    """The rank's device has an MTU of `bytes`; the bridge and the other ranks stay at 1500."""

    bytes: int

    def __post_init__(self) -> None:
        _within("bytes", self.bytes, 575, 65535)
        if self.bytes == 1500:
            raise ValueError("bytes=1500 is what everybody has")


class NetworkInjection(apart.ApartInjection):  # type: ignore[name-defined,misc]
    """One fault on the cables; all network faults of a run share the bridge."""

    def check(self) -> Unavailable | None:
        config = self.fault.config
        asked: list[str] = []
        match config:
            case Bandwidth():
                asked = ["tc"]
            case Drop(by="bpf"):
                asked = []
            case Drop() | Partition() | Blackhole():
                asked = ["nftables"]
            case Delay() | Reorder():
                asked = [] if doctor.capability("netem") is None else ["tun"]
        unmet = {name: why for name in asked if (why := doctor.capability(name)) is not None}
        target = self.fault.target
        size = self.site.world_size
        if isinstance(config, Partition) and not unmet:
            meant, peers = set(target.rank or ()), set(config.peers)
            if size is not None and peers and max(peers) >= size:
                return Unavailable(f"peers holds rank {max(peers)}, outside world size {size}", f"use 0 to {size - 1}")
            if target.rank is None and not peers:
                return Unavailable("a partition needs two sides, and every rank is on this one", "say rank, or use blackhole")
            if meant & peers:
                return Unavailable(f"ranks {sorted(meant & peers)} are on both sides", "say each rank once")
        return doctor.together(unmet)

    def part(self) -> Mapping[str, Any]:
        return {**super().part(), **asdict(self.fault.config)}


injector = Injector(
    name="network",
    layer="network",
    title="ranks in namespaces of their own: cables with little bandwidth, delay, loss, reordering, partitions, flaps, a wrong MTU",
    certifies_not="RDMA, ever: InfiniBand and RoCE go past the kernel's network, and a shaped veth says nothing about them. Nor NICs,"
    " drivers and switches: no offload, no pause frames, no ECMP.",
    needs=("linux", "root", "netns", "veth", "package:pyroute2"),
    actions={
        "bandwidth": Bandwidth,
        "delay": Delay,
        "reorder": Reorder,
        "drop": Drop,
        "partition": Partition,
        "blackhole": Blackhole,
        "flap": Flap,
        "mtu": Mtu,
    },
    targets=("rank", "after_s", "for_s"),
    make=NetworkInjection,
)
