"""What each network fault does to a rank's cable: put on, taken off, and how many packets it met."""

from __future__ import annotations

import json
import os
import random
import threading
from typing import Any

from bpf import dropper
from cables import CommandFailed, Net, port
from forwarder import Hold

ROOT = 0xFFFFFFFF
MEGABIT = 1_000_000 // 8
CLSACT_INGRESS = 0xFFFFFFF2


def ways(part: dict[str, Any]) -> tuple[str, ...]:
    return ("out", "in") if part["way"] == "both" else (part["way"],)


class Bandwidth:
    """A queueing discipline at each sending end: tbf, or htb with one class."""

    def __init__(self, part: dict[str, Any], rank: int, net: Net) -> None:
        self.part = part
        self.net = net
        self.ends = [net.end(rank, way) for way in ways(part)]
        self._before: list[int] = []
        self._bytes = 0

    def on(self) -> None:
        for space, device in self.ends:
            links, index = self.net.links[space], self.net.index(space, device)
            rate = max(1, int(self.part["mbit"] * MEGABIT))
            burst = max(1 << 16, rate // 100)
            if self.part["by"] == "htb":
                links.tc("add", "htb", index=index, handle=0x10000, default=0x10)
                links.tc("add-class", "htb", index=index, handle=0x10010, parent=0x10000, rate=rate, ceil=rate, burst=burst)
            else:
                links.tc("add", "tbf", index=index, handle=0x10000, rate=rate, burst=burst, latency="100ms")
            self._before.append(self.net.counters(space, device)["tx_bytes"])

    def off(self) -> None:
        for (space, device), before in zip(self.ends, self._before, strict=True):
            self._bytes += self.net.counters(space, device)["tx_bytes"] - before
            self.net.links[space].tc("del", index=self.net.index(space, device), parent=ROOT)

    def met(self) -> tuple[int, str]:
        return self._bytes, f"{self._bytes} bytes through {self.part['mbit']:g} Mbit/s ({self.part['by']})"


class Netem:
    """The kernel's own way to hold packets back."""

    def __init__(self, part: dict[str, Any], rank: int, net: Net) -> None:
        self.part = part
        self.net = net
        self.ends = [net.end(rank, way) for way in ways(part)]
        self._before: list[int] = []
        self._packets = 0

    def on(self) -> None:
        microseconds = int(self.part["seconds"] * 1e6)
        options: dict[str, Any] = {"delay": microseconds, "limit": 100_000}
        if self.part["action"] == "delay":
            options["jitter"] = int(self.part["jitter_s"] * 1e6)
        else:
            # netem's probability is that of passing at once.
            options["prob_reorder"] = 100 - self.part["percent"]
        for space, device in self.ends:
            self.net.links[space].tc("add", "netem", index=self.net.index(space, device), handle=0x10000, **options)
            self._before.append(self.net.counters(space, device)["tx_packets"])

    def off(self) -> None:
        for (space, device), before in zip(self.ends, self._before, strict=True):
            self._packets += self.net.counters(space, device)["tx_packets"] - before
            self.net.links[space].tc("del", index=self.net.index(space, device), parent=ROOT)

    def met(self) -> tuple[int, str]:
        return self._packets, f"{self._packets} packets through netem"


class Held:
    """The same by the forwarder."""

    def __init__(self, part: dict[str, Any], rank: int, net: Net) -> None:
        assert net.forwarder is not None
        self.forwarder = net.forwarder
        self.rank = rank
        self.holds = {}
        for way in ways(part):
            dice = random.Random(f"{part['seed']}/{part['index']}/{rank}/{way}")
            overtaken = part["percent"] / 100 if part["action"] == "reorder" else None
            self.holds[way] = Hold(part["seconds"], part.get("jitter_s", 0.0), overtaken, dice)

    def on(self) -> None:
        for way, hold in self.holds.items():
            self.forwarder.hold(self.rank, way, hold)

    def off(self) -> None:
        for way, hold in self.holds.items():
            self.forwarder.release(self.rank, way, hold)

    def met(self) -> tuple[int, str]:
        count, passed = (sum(getattr(hold, name) for hold in self.holds.values()) for name in ("count", "passed"))
        return count, f"{count} of {passed} packets held back"


class Filter:
    """Packets dropped by nft where they arrive: some by chance, those of some ranks, or all."""

    def __init__(self, part: dict[str, Any], rank: int, net: Net) -> None:
        self.net = net
        self.table = f"dtprobe_{part['index']}_{rank}"
        self.rules: list[tuple[str, str, str]] = []
        self._met = [0, 0]
        for way in ways(part):
            if part["action"] == "drop":
                match = f"numgen random mod 100000 < {max(1, round(part['percent'] * 1000))} "
            elif part["action"] == "partition":
                meant = part["rank"] if part["rank"] is not None else [rank]
                others = part["peers"] or [one for one in range(net.size) if one not in meant]
                match = f"ip {'daddr' if way == 'out' else 'saddr'} {{ {', '.join(net.address(one) for one in others)} }} "
            else:
                match = ""
            self.rules.append((*net.far(rank, way), match))

    def on(self) -> None:
        for at, (space, device, match) in enumerate(self.rules):
            chain = f'type filter hook ingress device "{device}" priority 0; policy accept;'
            # what the kernel says by itself (address resolution, group membership) is lost too, but is no packet of the ranks
            theirs = "meta protocol ip ip protocol { tcp, udp, icmp } "
            rules = f"{theirs}counter\n{theirs}{match}counter drop" + ("" if match else "\ndrop")
            text = f"table netdev {self.table}_{at} {{\n chain c {{ {chain}\n{rules}\n }}\n}}\n"
            self.net.command(space, "nft", "-f", "-", text=text)

    def off(self) -> None:
        for at, (space, _, _) in enumerate(self.rules):
            name = f"{self.table}_{at}"
            listed = json.loads(self.net.command(space, "nft", "-j", "list", "table", "netdev", name))
            counts = [
                word["counter"]["packets"]
                for item in listed["nftables"]
                for word in item.get("rule", {}).get("expr", ())
                if "counter" in word
            ]
            self._met = [self._met[0] + counts[0], self._met[1] + counts[1]]
            self.net.command(space, "nft", "delete", "table", "netdev", name)

    def met(self) -> tuple[int, str]:
        return self._met[1], f"{self._met[1]} of {self._met[0]} packets dropped"


class BpfDrop:
    """Packets dropped by chance in a classifier (cls_bpf) where they arrive."""

    def __init__(self, part: dict[str, Any], rank: int, net: Net) -> None:
        self.part = part
        self.net = net
        self.ends = [net.far(rank, way) for way in ways(part)]
        self._dropped = 0

    def on(self) -> None:
        program = dropper(self.part["percent"] / 100)
        for space, device in self.ends:
            links, index = self.net.links[space], self.net.index(space, device)
            links.tc("add", "clsact", index=index)
            links.tc(
                "add-filter", "bpf", index=index, parent=CLSACT_INGRESS, prio=1, fd=program, name="drop", direct_action=True
            )
        os.close(program)  # the classifiers hold it now

    def off(self) -> None:
        for space, device in self.ends:
            links, index = self.net.links[space], self.net.index(space, device)
            for one in links.get_qdiscs(index):
                if one.get_attr("TCA_KIND") == "clsact":
                    self._dropped += one.get_attr("TCA_STATS2").get_attr("TCA_STATS_QUEUE")["drops"]
            links.tc("del", "clsact", index=index)

    def met(self) -> tuple[int, str]:
        return self._dropped, f"{self._dropped} packets dropped (cls_bpf)"


class Flap:
    """The cable is pulled and put back, `count` times: the rank's end loses its carrier."""

    def __init__(self, part: dict[str, Any], rank: int, net: Net, log: Any) -> None:
        self.part = part
        self.rank = rank
        self.net = net
        self.log = log
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._count = 0

    def on(self) -> None:
        self._thread.start()

    def off(self) -> None:
        self._end.set()
        self._thread.join(10)
        self._set("up")

    def _run(self) -> None:
        for _ in range(self.part["count"]):
            self._set("down")
            self._count += 1
            self._end.wait(self.part["down_s"])
            self._set("up")
            if self._end.wait(self.part["up_s"]):
                return

    def _set(self, state: str) -> None:
        self.net.command("sw", "ip", "link", "set", port(self.rank), state)

    def met(self) -> tuple[int, str]:
        return self._count, f"link down {self._count} times"


class Mtu:
    """The rank's end takes larger packets than the bridge's port, or smaller ones than everybody else."""

    def __init__(self, part: dict[str, Any], rank: int, net: Net) -> None:
        self.part = part
        self.net = net
        self.rank = rank
        self._was = 0
        self._lost = 0
        self._sent = 0

    def on(self) -> None:
        links, index = self.net.links[str(self.rank)], self.net.index(str(self.rank), "dtp0")
        self._was = links.get_links(index)[0].get_attr("IFLA_MTU")
        self._lost = -self._lost_now()
        self._sent = -self._sent_now()
        links.link("set", index=index, mtu=self.part["bytes"])

    def off(self) -> None:
        self._lost += self._lost_now()
        self._sent += self._sent_now()
        self.net.links[str(self.rank)].link("set", index=self.net.index(str(self.rank), "dtp0"), mtu=self._was)

    def met(self) -> tuple[int, str]:
        words = f"{self._sent} packets sent at an MTU of {self.part['bytes']}, {self._lost} lost at the cable's other end"
        return self._lost if self.part["bytes"] > 1500 else self._sent, words

    def _lost_now(self) -> int:
        """What veth refuses counts at both of its ends."""
        return max(
            self.net.counters(str(self.rank), "dtp0")["tx_dropped"], self.net.counters("sw", port(self.rank))["rx_dropped"]
        )

    def _sent_now(self) -> int:
        return self.net.counters(str(self.rank), "dtp0")["tx_packets"]


def make(part: dict[str, Any], rank: int, net: Net, log: Any) -> Any:
    """The effect of a fault on a rank's cable."""
    action = part["action"]
    if action == "bandwidth":
        return Bandwidth(part, rank, net)
    if action in ("delay", "reorder"):
        held = net.forwarder is not None and (rank, "out") in net.forwarder.ways
        return Held(part, rank, net) if held else Netem(part, rank, net)
    if action == "drop" and part["by"] == "bpf":
        return BpfDrop(part, rank, net)
    if action in ("drop", "partition", "blackhole"):
        return Filter(part, rank, net)
    if action == "flap":
        return Flap(part, rank, net, log)
    if action == "mtu":
        return Mtu(part, rank, net)
    raise CommandFailed(f"no such action: {action}")
