"""Namespaces, bridge and cables, by netlink (pyroute2); commands run in a namespace where netlink has no words (nft).

A cable is a veth pair, or where packets must be held back and the kernel has no netem, two TAP devices with a program between.
The rank's end is `dtp0` in the rank's namespace, the other `port<k>`, a port of the bridge.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from forwarder import Forwarder, within
from pyroute2 import IPRoute, NetlinkError, netns

DEVICE = "dtp0"
BRIDGE = "bridge"
COMMAND_S = 20.0
HOLDING = ("delay", "reorder")
PACKET_SIZED = ("drop", "reorder", "mtu")
"""Faults that count packets: segments are then cut before they leave, not left whole as between veths."""


class CommandFailed(RuntimeError):
    """A command in a namespace failed; the message is its own."""


class Net:
    """The network of `size` ranks. Namespaces `<prefix>-sw` and `<prefix>-<rank>` are whoever's job it is to undo."""

    def __init__(self, prefix: str, subnet: str, size: int, parts: list[dict[str, Any]], log: Any) -> None:
        self.prefix = prefix
        self.subnet = subnet
        self.size = size
        self.log = log
        self.links: dict[str, IPRoute] = {}
        self.forwarder: Forwarder | None = None
        self._parts = parts

    def build(self) -> None:
        for space in ("sw", *map(str, range(self.size))):
            netns.create(self.space(space))
            self.links[space] = IPRoute(netns=self.space(space))
            self._up(space, "lo")
        switch = self.links["sw"]
        switch.link("add", ifname=BRIDGE, kind="bridge")
        self._address("sw", BRIDGE, 254)
        self._up("sw", BRIDGE)
        held = self._held()
        if held:
            self.forwarder = Forwarder(
                {rank: (self.space(str(rank)), self.space("sw")) for rank in held}, whole=not self._sized()
            )
        for rank in range(self.size):
            if rank not in held:
                peer = {"ifname": DEVICE, "net_ns_fd": self.space(str(rank))}
                switch.link("add", ifname=port(rank), kind="veth", peer=peer)
            switch.link("set", index=self.index("sw", port(rank)), master=self.index("sw", BRIDGE))
            self._up("sw", port(rank))
            if self._sized():
                self.links[str(rank)].link("set", index=self.index(str(rank), DEVICE), gso_max_segs=1)
            self._address(str(rank), DEVICE, rank + 1)
            self._up(str(rank), DEVICE)
        if self._sized():
            switch.link("set", index=self.index("sw", BRIDGE), gso_max_segs=1)
        if self.forwarder is not None:
            self.forwarder.start()

    def close(self) -> None:
        if self.forwarder is not None:
            self.forwarder.stop()
        for one in self.links.values():
            one.close()

    def space(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def index(self, space: str, name: str) -> int:
        return int(self.links[space].link_lookup(ifname=name)[0])

    def end(self, rank: int, way: str) -> tuple[str, str]:
        """Where packets of that way leave the rank's cable's sending end: (namespace, device); `out` is from the rank."""
        return (str(rank), DEVICE) if way == "out" else ("sw", port(rank))

    def far(self, rank: int, way: str) -> tuple[str, str]:
        """Where packets of that way arrive."""
        return self.end(rank, "in" if way == "out" else "out")

    def command(self, space: str, *argv: str, text: str | None = None) -> str:
        """What a command in a namespace printed. Raises CommandFailed."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.space(space), *argv],
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if done.returncode:
            raise CommandFailed(f"{argv[0]} failed: {(done.stderr or done.stdout).strip()[:300]}")
        return done.stdout

    def counters(self, space: str, device: str) -> dict[str, int]:
        """The device's statistics (struct rtnl_link_stats64)."""
        return dict(self.links[space].get_links(self.index(space, device))[0].get_attr("IFLA_STATS64"))

    def address(self, rank: int) -> str:
        return f"{self.subnet}{rank + 1}"

    def netem(self) -> bool:
        """Whether the kernel has netem: tried on the bridge's own loopback."""
        loopback = self.index("sw", "lo")
        try:
            self.links["sw"].tc("add", "netem", index=loopback, handle="1:", delay=1000)
        except NetlinkError:
            return False
        self.links["sw"].tc("del", index=loopback, parent=0xFFFFFFFF)
        return True

    def _held(self) -> set[int]:
        """Ranks whose packets a program has to hold back: netem is missing, or its place is taken by a limit of bandwidth."""
        found = set()
        netem = self.netem()
        for part in self._parts:
            if part["action"] in HOLDING:
                for rank in range(self.size):
                    limited = any(one["action"] == "bandwidth" and _hits(one, rank) for one in self._parts)
                    if _hits(part, rank) and (limited or not netem):
                        found.add(rank)
        return found

    def _sized(self) -> bool:
        return any(part["action"] in PACKET_SIZED for part in self._parts)

    def _address(self, space: str, device: str, host: int) -> None:
        self.links[space].addr("add", index=self.index(space, device), address=f"{self.subnet}{host}", prefixlen=24)

    def _quiet(self, space: str, device: str) -> None:
        """No IPv6 there: its neighbour discovery would count as packets of the ranks."""
        with within(self.space(space)):
            Path(f"/proc/sys/net/ipv6/conf/{device}/disable_ipv6").write_text("1", encoding="ascii")

    def _up(self, space: str, device: str) -> None:
        if device != "lo" and Path("/proc/sys/net/ipv6").exists():
            self._quiet(space, device)
        self.links[space].link("set", index=self.index(space, device), state="up")


def port(rank: int) -> str:
    return f"port{rank}"


def _hits(part: dict[str, Any], rank: int) -> bool:
    return part["rank"] is None or rank in part["rank"]
