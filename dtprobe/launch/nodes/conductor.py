"""One arm run on several nodes, seen from the machine that started it: agents up, clocks read, ranks let go together, all gathered."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dtprobe.armrun import ArmPlan, ArmRecord, Injected
from dtprobe.clock import Clock
from dtprobe.confine import Confinement
from dtprobe.errors import DtprobeError, UsageError
from dtprobe.inject import Firing
from dtprobe.inject.spec import Fault
from dtprobe.launch import RankExit
from dtprobe.launch.nodes import BEAT_S, COME_S, STOP_S, split
from dtprobe.launch.nodes.agent import described
from dtprobe.launch.nodes.exchange import Exchange
from dtprobe.launch.nodes.ground import Call, Ground
from dtprobe.launch.nodes.powers import Powers
from dtprobe.launch.nodes.shipping import take
from dtprobe.launch.nodes.wire import Message, Wire
from dtprobe.probes import Recorded
from dtprobe.readers.hosts import Host, Hosts, Reading
from dtprobe.scenario import Probe

HELLO_S = 10.0
HELLO_BYTES = 4096
CLOSE_S = 5.0
APART = ("network", "rdma-frames")
"""Injectors that put ranks into namespaces of their own on one machine: they cannot join the ranks of several nodes."""


@dataclass
class Node:
    """A node as this side knows it. `lost` says why it was given up."""

    number: int
    ranks: tuple[int, ...]
    name: str = ""
    address: str = ""
    pid: int = 0
    wire: Wire | None = None
    exchange: Exchange | None = None
    before: Reading | None = None
    after: Reading | None = None
    held: dict[int, int] = field(default_factory=dict)
    done: Message | None = None
    lost: str = ""
    lost_ns: int | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Whether more is to come from it."""
        return not self.lost and self.done is None


class Conductor:
    """One arm run on the nodes of a ground."""

    def __init__(
        self, box: Confinement, plan: ArmPlan, ground: Ground, *, folder: Path, silence_s: float, seed: int, clock: Clock
    ) -> None:
        self._box = box
        self._plan = plan
        self._ground = ground
        self._folder = folder.absolute()
        self._silence_s = silence_s
        self._seed = seed
        self._clock = clock
        world_size = plan.workload.world_size
        if world_size is None:
            raise UsageError("a foreign command cannot be spread over nodes", "let its own launcher do it")
        self._nodes = [Node(number, ranks) for number, ranks in enumerate(split(world_size, ground.nodes))]
        self._token = secrets.token_hex(16)
        self._over = threading.Event()
        self._powers = Powers(box, plan, self._folder, ground.nodes, seed=seed, clock=clock)

    def execute(self, probes: Sequence[Probe], environ: Mapping[str, str]) -> ArmRecord:
        """Run the arm once; returns when nothing of it runs on any node.

        Raises DtprobeError where an agent does not come up or cannot start its ranks, UsageError for a fault that cannot be.
        """
        told = self._told(probes)
        self._powers.check()
        self._folder.mkdir(parents=True, exist_ok=True)
        listener, address = self._ground.build()
        beats = threading.Thread(target=self._beat, name="dtprobe-beat", daemon=True)
        try:
            with listener:
                self._powers.prepare()
                call = Call(to=(address, listener.getsockname()[1]), token=self._token, silence_s=self._silence_s + 5)
                self._ground.start(call, self._folder / "launcher", self._powers.attached(environ))
                self._await_calls(listener)
            for node in self._nodes:
                node.before = _exchange(node).burst()
                if node.before is None:
                    raise DtprobeError(f"{node.name} does not answer: {_wire(node).lost or 'its clock cannot be compared'}")
            beats.start()
            started_ns = self._start(told)
            self._gather()
            ended_ns = self._clock.now_ns()
            for node in self._nodes:
                if not node.lost:
                    node.after = _exchange(node).burst()
            self._dismiss()
        except BaseException as error:
            self._dismiss(over=f"the run was ended: {type(error).__name__}")
            raise
        finally:
            self._over.set()
            fired = self._powers.stop({node.number: node.name for node in self._nodes})
            for node in self._nodes:
                if node.wire is not None:
                    node.wire.close()
            self._box.problems += self._box.kill_all()
            self._ground.close()
        return self._record(started_ns, ended_ns, fired, [probe.name for probe in probes])

    # Up

    def _told(self, probes: Sequence[Probe]) -> dict[str, Any]:
        work, plan = self._plan.workload, self._plan
        for fault in plan.faults:
            if fault.injector.name in APART:
                raise UsageError(
                    f"fault {str(fault)!r} cannot reach its target: it joins ranks of one machine, not of several nodes",
                    "use the local launcher",
                )
        return {
            "run_id": f"{self._box.run_id}-{secrets.token_hex(2)}",
            "name": plan.name,
            "repeat": plan.repeat,
            "traced": plan.traced,
            "probed": plan.probed,
            "argv": list(work.argv),
            "cwd": str(work.cwd),
            "timeout_s": work.timeout_s,
            "world_size": work.world_size,
            "env": dict(work.env),
            "hooks": list(work.hooks),
            "seed": self._seed,
            "probes": [described(probe) for probe in probes],
            "nodes": len(self._nodes),
        }

    def _faults_of(self, node: Node) -> list[Fault]:
        """Faults in the ranks of a node: those that name one of them, and those that mean every rank."""
        return [
            fault
            for fault in self._plan.faults
            if fault.target.node is None and (fault.target.rank is None or set(fault.target.rank) & set(node.ranks))
        ]

    def _await_calls(self, listener: socket.socket) -> None:
        give_up = self._clock.monotonic() + COME_S
        listener.settimeout(BEAT_S)
        while missing := [node for node in self._nodes if node.wire is None]:
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                if why := self._ground.failed():
                    raise DtprobeError(why, "what it printed is in launcher/ of the arm run") from None
                if self._clock.monotonic() > give_up:
                    told = ", ".join(f"node {node.number}" for node in missing)
                    raise DtprobeError(
                        f"{told} did not call within {COME_S:g} s",
                        "see launcher/ of the arm run, and whether the nodes reach this machine's address",
                    ) from None
                continue
            self._hello(sock)

    def _hello(self, sock: socket.socket) -> None:
        """The first line of whoever calls; a stranger is sent away."""
        sock.settimeout(HELLO_S)
        buffer = b""
        with suppress(OSError):
            while b"\n" not in buffer and len(buffer) < HELLO_BYTES and (part := sock.recv(HELLO_BYTES)):
                buffer += part
        line, _, rest = buffer.partition(b"\n")
        try:
            said = json.loads(line)
            known = hmac.compare_digest(str(said["token"]), self._token)
            node = self._nodes[int(said["hello"])]
        except (ValueError, KeyError, TypeError, IndexError):
            known = False
        if not known or node.wire is not None:
            sock.close()
            return
        others = {one.name for one in self._nodes if one is not node}
        node.name = said["host"] if said["host"] not in others else f"{said['host']}-{node.number}"
        node.address, node.pid = said["address"], said["pid"]
        node.wire = Wire(
            sock,
            soon=lambda message, t_ns: self._soon(node, message, t_ns),
            now_ns=self._clock.now_ns,
            patience_s=self._silence_s,
            rest=rest,
        )
        node.exchange = Exchange(node.wire.send, self._clock.now_ns)

    def _soon(self, node: Node, message: Message, t_ns: int) -> bool:
        if "pong" in message:
            _exchange(node).answered(message, t_ns)
        elif "file" in message:
            try:
                take(self._folder, message)
            except (OSError, ValueError) as error:
                text = f"{message['file']} of {node.name} could not be kept: {error}"
                if text not in node.problems:
                    node.problems.append(text)
        elif "suspected" in message:
            for other in self._nodes:
                if other is not node and other.open and other.wire is not None:
                    other.wire.send(suspected=message["suspected"])
        else:
            return False
        return True

    def _start(self, told: Mapping[str, Any]) -> int:
        """Have all ranks held, then let them go; the moment."""
        first = self._nodes[0]
        _wire(first).send(port=0)
        port = self._answer(first, "port", COME_S)["port"]
        for node in self._nodes:
            faults = [str(fault) for fault in self._faults_of(node)]
            run = {**told, "ranks": list(node.ranks), "faults": faults, "master": [first.address, port]}
            _wire(node).send(run=run)
        for node in self._nodes:
            node.held = {rank: pid for rank, pid in self._answer(node, "held", COME_S)["held"] if rank is not None}
        self._powers.begin({node.number: node.pid for node in self._nodes})
        now_ns = self._clock.now_ns()
        for node in self._nodes:
            _wire(node).send(go=True)
        return now_ns

    def _answer(self, node: Node, key: str, patience_s: float) -> Message:
        """What a node was asked for. Raises DtprobeError where it fails, or does not say."""
        message = _wire(node).next(patience_s)
        if message is None:
            raise DtprobeError(f"{node.name} was lost before its ranks began: {_wire(node).lost or 'it is silent'}")
        if "failed" in message:
            kind = UsageError if message.get("usage") else DtprobeError
            raise kind(f"{node.name}: {message['failed'][0]}", message["failed"][1])
        if key not in message:
            raise DtprobeError(f"{node.name} said {sorted(message)}, not {key}", "run the same dtprobe on all nodes")
        return message

    # While it runs

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            for node in self._nodes:
                if not node.lost and node.exchange is not None:
                    node.exchange.ping()

    def _gather(self) -> None:
        """Until every node has told how its part ended, or was given up."""
        give_up = self._clock.monotonic() + self._plan.workload.timeout_s + STOP_S
        while waiting := [node for node in self._nodes if node.open]:
            for node in waiting:
                self._look(node, late=self._clock.monotonic() > give_up)

    def _look(self, node: Node, *, late: bool) -> None:
        wire = _wire(node)
        message = wire.next(BEAT_S / 2)
        if message is not None and "done" in message:
            node.done = message
        elif message is not None and "failed" in message:
            node.lost = f"its agent failed: {message['failed'][0]}"
        elif message is not None:
            return
        elif wire.lost:
            node.lost = f"its connection ended: {wire.lost}"
        elif wire.silent_s() > self._silence_s:
            node.lost = f"nothing came from it for {self._silence_s:g} s"
        elif late:
            node.lost = f"it did not end within {STOP_S:g} s of the deadline"
        if node.lost:
            node.lost_ns = self._clock.now_ns()
            node.after = _exchange(node).latest()
            wire.close()

    def _dismiss(self, over: str = "") -> None:
        """Let the agents take their nodes down by themselves: what they made there is undone by who made it. `over` ends what runs."""
        live = [node for node in self._nodes if not node.lost and node.wire is not None]
        for node in live:
            if over:
                _wire(node).send(over=over)
            _wire(node).send(close=True)
        give_up = self._clock.monotonic() + CLOSE_S
        for node in live:
            while not _wire(node).lost and self._clock.monotonic() < give_up:
                _wire(node).next(BEAT_S / 2)

    # Together

    def _record(self, started_ns: int, ended_ns: int, fired: Mapping[int, Injected], names: Sequence[str]) -> ArmRecord:
        hosts = Hosts(reference=os.uname().nodename, hosts=tuple(_host(node) for node in self._nodes))
        hosts.write(self._folder)
        exits: list[RankExit] = []
        suspected: dict[tuple[int, str], None] = {}
        for node in self._nodes:
            if node.done is None:
                exits += [
                    RankExit(rank=rank, pid=node.held.get(rank), exit_code=None, signal=None, wall_s=0.0, cpu_s=0.0)
                    for rank in node.ranks
                ]
                continue
            exits += [RankExit(**one) for one in node.done["done"]["exits"]]
            host = _host(node)
            suspected |= {
                (int(t_ns) + host.offset_at(int(t_ns)), reason): None for t_ns, reason in node.done["done"]["suspected"]
            }
        return ArmRecord(
            self._plan,
            self._folder,
            started_ns,
            ended_ns,
            tuple(sorted(exits, key=lambda one: one.rank if one.rank is not None else -1)),
            {name: self._recorded(name) for name in names},
            tuple(sorted(suspected)),
            tuple(fired.get(index) or self._injected(fault) for index, fault in enumerate(self._plan.faults)),
            hosts,
        )

    def _recorded(self, name: str) -> Recorded:
        """What one recorder did on all nodes."""
        files: list[Path] = []
        problems: list[str] = []
        facts: dict[str, str] = {}
        cpu_s = stopped_s = 0.0
        for node in self._nodes:
            if node.done is None:
                problems.append(f"{node.name} was lost: its record ends where the node did")
                continue
            one = node.done["done"]["recorded"].get(name)
            if one is None:
                continue
            files += [self._folder / file for file in one["files"]]
            problems += [f"{node.name}: {text}" for text in one["problems"]]
            facts |= {f"{node.name}: {key}": value for key, value in one["facts"].items()}
            cpu_s, stopped_s = cpu_s + one["cpu_s"], stopped_s + one["stopped_s"]
        if name == "logs":  # the one recorder that every run has: what else went wrong with a node is said once
            problems += [text for node in self._nodes for text in (*node.problems, *(node.done or {}).get("problems", ()))]
        return Recorded(files=tuple(files), cpu_s=cpu_s, stopped_s=stopped_s, problems=tuple(problems), facts=facts)

    def _injected(self, fault: Fault) -> Injected:
        """What nodes said of a fault in ranks, on this machine's clock."""
        fired: list[Firing] = []
        problems: list[str] = []
        for node in self._nodes:
            if node.done is None:
                continue
            host = _host(node)
            for one in node.done["done"]["injected"]:
                if one["fault"] == str(fault):
                    fired += [_firing(hit, host) for hit in one["fired"]]
                    problems += [f"{node.name}: {text}" for text in one["problems"]]
        return Injected(str(fault), tuple(sorted(fired, key=lambda one: one.t_ns)), tuple(problems))


def _firing(said: Mapping[str, Any], host: Host) -> Firing:
    hit = Firing(**{**said, "detail": said["detail"] or ""})
    ended_ns = hit.ended_ns + host.offset_at(hit.ended_ns) if hit.ended_ns is not None else None
    return replace(hit, t_ns=hit.t_ns + host.offset_at(hit.t_ns), ended_ns=ended_ns)


def _host(node: Node) -> Host:
    assert node.before is not None, "no node runs before its clock was read"
    return Host(
        name=node.name,
        node=node.number,
        ranks=node.ranks,
        address=node.address,
        before=node.before,
        after=node.after,
        lost=node.lost,
        lost_ns=node.lost_ns,
    )


def _wire(node: Node) -> Wire:
    assert node.wire is not None, "no node is spoken to before it called"
    return node.wire


def _exchange(node: Node) -> Exchange:
    assert node.exchange is not None, "no node is spoken to before it called"
    return node.exchange
