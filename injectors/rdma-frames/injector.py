"""RoCEv2 traffic: frames of RDMA writes and congestion notifications on a rank's cable, and a bounded load on a real device."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import dtprobe
from dtprobe import doctor
from dtprobe.catalog import load_module
from dtprobe.errors import DtprobeError, Unavailable
from dtprobe.inject import Injection, Injector, Site
from dtprobe.inject.helped import HelpedInjection
from dtprobe.inject.spec import Fault

HERE = Path(__file__).resolve().parent
DEVICES = Path("/sys/class/infiniband")
MESSAGE_MAX = 1 << 18
RATE_MAX = 1_000_000
BUILD_S = 120.0
LOAD_MAX_S = 600

By = Literal["any", "tcpreplay", "socket"]
apart = load_module(HERE.parent / "network" / "apart.py", "_dtprobe_rdma_frames_apart")


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name}={value:g} is not between {least:g} and {most:g}")


@dataclass(frozen=True, kw_only=True)
class Write:
    """RDMA writes of `bytes`, in frames of at most `mtu` bytes of data, arrive at the rank: `rate` frames a second."""

    rate: float = 1000.0
    bytes: int = 4096
    mtu: Literal["256", "512", "1024"] = "1024"
    qp: int = 17
    by: By = "any"

    def __post_init__(self) -> None:
        _within("rate", self.rate, 1, RATE_MAX)
        _within("bytes", self.bytes, 1, MESSAGE_MAX)
        _within("qp", self.qp, 2, (1 << 24) - 1)


@dataclass(frozen=True, kw_only=True)
class Cnp:
    """Congestion notification packets for queue pair `qp` arrive at the rank: `rate` a second."""

    rate: float = 1000.0
    qp: int = 17
    by: By = "any"

    def __post_init__(self) -> None:
        _within("rate", self.rate, 1, RATE_MAX)
        _within("qp", self.qp, 2, (1 << 24) - 1)


@dataclass(frozen=True, kw_only=True)
class Load:
    """ib_write_bw from an RDMA device to itself for `seconds`, at most `gbits` Gbit/s where said: it takes bandwidth from the job."""

    seconds: int = 10
    gbits: float | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        _within("seconds", self.seconds, 1, LOAD_MAX_S)
        if self.gbits is not None and self.gbits <= 0:
            raise ValueError(f"gbits={self.gbits:g} is not above 0")


def _check(fault: Fault) -> None:
    if fault.action == "load" and (fault.target.rank is not None or fault.target.for_s is not None):
        raise ValueError("a load is on a device, not on a rank, and lasts for seconds=: leave rank and for_s out")


class FramesInjection(apart.ApartInjection):  # type: ignore[name-defined]
    """Frames on the cables of the network's faults: each rank is in a namespace of its own, and no device of the host is touched."""

    effects = HERE / "effects.py"

    def check(self) -> Unavailable | None:
        asked = ["root", "netns", "veth", "package:pyroute2", "package:scapy"]
        if self._by() == "tcpreplay":
            asked.append("tcpreplay")
        return doctor.together({name: why for name in asked if (why := doctor.capability(name)) is not None})

    def part(self) -> Mapping[str, Any]:
        return {
            **super().part(),
            **asdict(self.fault.config),
            "by": self._by(),
            "frames": self._frames,
            "evidence": self._evidence,
        }

    def prepare(self) -> None:
        super().prepare()
        ranks = range(self.site.world_size or 0)
        for rank in ranks if self.fault.target.rank is None else self.fault.target.rank:
            self._build(rank)

    @property
    def _frames(self) -> str:
        return str(self.shared.folder / f"frames-{self.site.index:03}-{{rank}}.pcap")

    @property
    def _evidence(self) -> str:
        return str(self.log.parent / f"rdma-frames-{self.site.index:03}-rank{{rank}}.pcap")

    def _by(self) -> str:
        by = getattr(self.fault.config, "by")  # noqa: B009
        if by != "any":
            return str(by)
        return "socket" if doctor.capability("tcpreplay") else "tcpreplay"

    def _build(self, rank: int) -> None:
        """Raises DtprobeError with the program's own words."""
        config: Any = self.fault.config
        subnet = apart.SUBNET
        asked = {
            **asdict(config),
            "mtu": int(getattr(config, "mtu", 0)),
            "action": self.fault.action,
            "source": f"{subnet}254",
            "target": f"{subnet}{rank + 1}",
        }
        box, said = self.site.box, self.shared.folder / f"frames-{self.site.index:03}.said"
        path = ":".join(filter(None, [str(Path(dtprobe.__file__).resolve().parent.parent), box.environ.get("PYTHONPATH")]))
        child = box.spawn(
            [sys.executable, str(HERE / "frames.py"), self._frames.format(rank=rank), json.dumps(asked)],
            env={**box.environ, "PYTHONPATH": path},
            cwd=self.shared.folder,
            stdout=said,
            stderr=said,
            held=False,
        )
        ended = box.wait(child, BUILD_S)
        if ended is None or ended.code != 0:
            words = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise DtprobeError(f"the frames could not be built: {words[-1] if words else 'not in time'}")


class LoadInjection(HelpedInjection):
    """A bounded load on a real device, by a helper; nothing is in front of a rank."""

    name = "rdma-load"
    program = HERE / "load.py"

    def check(self) -> Unavailable | None:
        unmet = {name: why for name in ("rdma", "command:ib_write_bw") if (why := doctor.capability(name)) is not None}
        if unmet:
            return doctor.together(unmet)
        device = getattr(self.fault.config, "device")  # noqa: B009
        if device is not None and not (DEVICES / device).exists():
            return Unavailable(f"there is no RDMA device {device}", f"there are {', '.join(sorted(os.listdir(DEVICES)))}")  # noqa: PTH208
        return None

    def whole(self) -> bool:
        return False

    def in_ranks(self) -> bool:
        return False

    def part(self) -> Mapping[str, Any]:
        config: Any = self.fault.config
        device = config.device or sorted(path.name for path in DEVICES.iterdir())[0]
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        return {**asdict(config), "device": device, "port": port}

    def silence(self) -> str:
        return "the job ended before the load began"


def make(fault: Fault, site: Site) -> Injection:
    return LoadInjection(fault, site) if fault.action == "load" else FramesInjection(fault, site)


injector = Injector(
    name="rdma-frames",
    layer="network",
    title="RoCEv2 writes and congestion notifications arrive on a rank's cable, or a real RDMA device is loaded with ib_write_bw",
    certifies_not="That anything takes the frames for RDMA: no queue pair is behind them, no device slows down at a notification, nothing is"
    " written to memory. The load of a device says nothing of a fabric: it never leaves the host.",
    needs=("linux",),
    actions={"write": Write, "cnp": Cnp, "load": Load},
    targets=("rank", "after_s", "for_s"),
    make=make,
    check=_check,
)
