"""A whole node goes: its power is cut, so that nobody on the network hears of it, or its cable is pulled."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtprobe import doctor, processes
from dtprobe.errors import Unavailable
from dtprobe.inject import Firing, Injection, Injector, Site
from dtprobe.inject.ranks import Seen, Watch
from dtprobe.inject.spec import Fault
from dtprobe.probes import RankProcess

DEVICE = "dtp0"
COMMAND_S = 10.0
LOOK_S = 0.05
NEEDS = ("root", "netns", "command:nsenter", "command:ip")


@dataclass(frozen=True, kw_only=True)
class Lose:
    """Power cut: the cable is dead first, then every process of the node: no peer gets a FIN or a RST.

    With `mark` not before one of the node's ranks has left a file of that name (`dtprobe.worker.together` does) among its artifacts.
    """

    mark: str = ""

    def __post_init__(self) -> None:
        _check(self.mark)


@dataclass(frozen=True, kw_only=True)
class Unplug:
    """The node's cable is pulled; its processes live on. Put back after for_s, else never. `mark` as for `lose`."""

    mark: str = ""

    def __post_init__(self) -> None:
        _check(self.mark)


def _check(mark: str) -> None:
    if not re.fullmatch(r"[\w.-]*", mark):
        raise ValueError(f"mark={mark} is no plain name of a file")


class NodeInjection(Injection):
    """Acts on the node of the one process that it is shown, the node's agent: on all that lives in its network namespace."""

    def __init__(self, fault: Fault, site: Site) -> None:
        self.fault = fault
        self.site = site
        self._watch = Watch(site, fault.target, self._act)
        self._fired: list[Firing] = []
        self._space: Path | None = None

    def check(self) -> Unavailable | None:
        if self.fault.action == "lose" and self.fault.target.for_s is not None:
            return Unavailable("a lost node does not come back, so for_s means nothing", "leave for_s out, or use node:unplug")
        return doctor.together(doctor.here().unmet(NEEDS))

    def start(self, held: Sequence[RankProcess]) -> None:
        self._watch.start(held)

    def stop(self) -> tuple[Firing, ...]:
        self._watch.stop()
        return tuple(self._fired)

    def problems(self) -> tuple[str, ...]:
        if self._fired or self._watch.problems:
            return tuple(self._watch.problems)
        mark = getattr(self.fault.config, "mark", "")
        return (f"the run ended before after_s={self.fault.target.after_s or 0:g}" + (f" and the mark {mark}" if mark else ""),)

    def _act(self, seen: Seen) -> None:
        """Once the mark is there: it comes from the node as all its artifacts do, within half a second."""
        mark = getattr(self.fault.config, "mark", "")
        if mark and not any(self.site.folder.parent.parent.glob(f"rank*/{mark}")):
            self._watch.later(LOOK_S, lambda: self._act(seen))
            return
        self._strike(seen)

    def _strike(self, seen: Seen) -> None:
        space = Path(f"/proc/{seen.who.pid}/ns/net")
        if space.stat().st_ino == Path("/proc/self/ns/net").stat().st_ino:
            raise RuntimeError("the node has no network of its own: only the launcher hosts gives it one")
        self._link(seen.who.pid, "down")
        now_ns = self.site.clock.now_ns()
        if self.fault.action == "lose":
            gone = self._kill(space.stat().st_ino)
            detail = f"cable dead, then SIGKILL to all {gone} processes"
        else:
            detail = "cable pulled"
            if self.fault.target.for_s is not None:
                self._watch.later(self.fault.target.for_s, lambda: self._back(seen.who.pid))
        self._fired.append(Firing(t_ns=now_ns, detail=detail))

    def _kill(self, inode: int) -> int:
        """All at once: who is not yet dead must not start another."""
        victims = []
        for folder in processes.PROC.iterdir():
            if folder.name.isdigit():
                try:
                    inside = (folder / "ns" / "net").stat().st_ino == inode
                except OSError:  # ended meanwhile, or a kernel thread
                    continue
                if inside and (who := processes.identity(int(folder.name))) is not None:
                    victims.append(who)
        return sum(processes.send(who, signal.SIGKILL) for who in victims)

    def _back(self, pid: int) -> None:
        self._link(pid, "up")
        (one,) = self._fired
        self._fired = [
            Firing(t_ns=one.t_ns, ended_ns=self.site.clock.now_ns(), detail=one.detail),
        ]

    def _link(self, pid: int, state: str) -> None:
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "link", "set", DEVICE, state],
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the cable cannot be set {state}: {done.stderr.strip()[:200]}")


def _aimed(fault: Fault) -> None:
    if fault.target.node is None:
        raise ValueError("which node? add node=1")


injector = Injector(
    name="node",
    layer="network",
    title="a whole node loses its power, or its cable",
    certifies_not="That a switch, a real NIC or a BMC behaves so: the node is a set of namespaces, and its disk stays readable here."
    " A machine that reboots and answers its peers' packets with RST is another case.",
    needs=("linux", "root", "netns"),
    actions={"lose": Lose, "unplug": Unplug},
    targets=("node", "after_s", "for_s"),
    make=NodeInjection,
    check=_aimed,
)
