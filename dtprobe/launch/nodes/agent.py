"""The program on a node: `python -m dtprobe.launch.nodes.agent`, which calls the conductor and does what it is told.

It answers clock exchanges, runs its part of an arm with `armrun.execute` under a confinement of its own, sends what the ranks and the
recorders leave as it grows, and says how all of it ended. When the conductor is gone, or silent for too long, it takes its node down.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import psutil

from dtprobe import armrun, catalog
from dtprobe.armrun import ArmPlan, ArmRecord, Workload
from dtprobe.clock import SystemClock
from dtprobe.confine import Confinement
from dtprobe.errors import DtprobeError, Unavailable
from dtprobe.inject import firing_json
from dtprobe.inject.spec import parse
from dtprobe.launch import ReservedPort
from dtprobe.launch.nodes import BEAT_S, TOLD, Seats
from dtprobe.launch.nodes.ranks import Given, NodeRanks
from dtprobe.launch.nodes.shipping import Shipper
from dtprobe.launch.nodes.wire import Message, Wire
from dtprobe.probes import RankProcess, Recorder, Where
from dtprobe.scenario import Probe

CALL_S = 30.0
FOREIGN = ("SLURM_", "SLURMD_", "PMI_", "PMIX_", "SRUN_")
"""Variables of the launcher that started this agent: to the ranks they would be a second placement beside their own."""


@dataclass(frozen=True)
class Relay:
    """A recorder that records nothing: it carries a suspicion of one node to the others, whose recorders then take what they can."""

    name: ClassVar[str] = "relay"
    heavy: ClassVar[bool] = False
    tell: Callable[[str], bool]
    heard: list[Callable[[str], None]]

    def probe(self) -> Unavailable | None:
        return None

    def recorder(self, where: Where) -> Recorder:
        return RelayRecorder(self, where)


class RelayRecorder(Recorder):
    def __init__(self, config: Relay, where: Where) -> None:
        self._tell = config.tell
        self._suspect = where.suspect
        self._known: set[str] = set()
        config.heard.append(self.hear)

    def hear(self, reason: str) -> None:
        """Another node suspects a hang."""
        if reason not in self._known:
            self._known.add(reason)
            self._suspect(reason)

    def suspected(self, reason: str) -> None:
        if reason not in self._known:
            self._known.add(reason)
            self._tell(reason)


class Agent:
    """One node's side of the connection."""

    def __init__(self, told: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self.node: int = told["node"] if told["node"] is not None else int(environ["SLURM_NODEID"])
        self.host: str = told["name"] or environ.get("SLURMD_NODENAME") or os.uname().nodename
        self.environ = {name: value for name, value in environ.items() if not name.startswith(FOREIGN)}
        self._silence_s = float(told["silence_s"])
        self._clock = SystemClock()
        self._given = Given()
        self._heard: list[Callable[[str], None]] = []
        self._port: ReservedPort | None = None
        self._address = ""
        self.wire = Wire(self._call(told), soon=self._soon, now_ns=self._clock.now_ns, patience_s=self._silence_s)
        self.wire.send(
            hello=self.node,
            token=told["token"],
            host=self.host,
            pid=os.getpid(),
            address=self._address,
        )

    def serve(self) -> None:
        """Until the conductor closes the connection, or is gone."""
        while (message := self.wire.next(BEAT_S)) is not None or not self._gone():
            if message is None:
                continue
            if "port" in message:
                self._port = ReservedPort()
                self.wire.send(port=self._port.number)
            elif "run" in message:
                self._run(message["run"])
            elif "close" in message:
                break
        self.wire.close()

    def _call(self, told: Mapping[str, Any]) -> socket.socket:
        deadline = time.monotonic() + CALL_S
        while True:
            try:
                sock = socket.create_connection((told["to"][0], told["to"][1]), timeout=CALL_S)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    sys.exit(
                        f"dtprobe: node {self.host} cannot reach {told['to'][0]}:{told['to'][1]}: {error.strerror or error}"
                    )
                time.sleep(0.1)
        self._address = sock.getsockname()[0]
        return sock

    def _soon(self, message: Message, t_ns: int) -> bool:
        if "ping" in message:
            self.wire.send(pong=message["ping"], came_ns=t_ns, left_ns=self._clock.now_ns())
        elif "go" in message:
            self._given.go.set()
        elif "over" in message:
            self._given.stop(str(message["over"]))
        elif "suspected" in message:
            for hear in self._heard:
                threading.Thread(target=hear, args=(str(message["suspected"]),), name="dtprobe-relay", daemon=True).start()
        else:
            return False
        return True

    def _gone(self) -> bool:
        """Whether the conductor is; what runs then is over."""
        if not self.wire.lost and self.wire.silent_s() > self._silence_s:
            self.wire.close()
        if self.wire.lost:
            self._given.stop(f"the connection to the machine that started the run is lost: {self.wire.lost}")
        return bool(self.wire.lost)

    def _run(self, told: Mapping[str, Any]) -> None:
        ended = threading.Event()
        beside: list[threading.Thread] = []
        try:
            with Confinement.open(f"{told['run_id']}-{self.node}", environ=self.environ) as box:
                folder = box.scratch / "arm"
                folder.mkdir()
                shipper = Shipper(folder, self.wire.send)
                shipping = threading.Thread(target=self._ship, args=(shipper, ended), name="dtprobe-ship", daemon=True)
                beside.append(shipping)
                shipping.start()
                record = self._execute(box, folder, told)
                ended.set()
                shipping.join()
                shipper.ship(last=True)
                problems = list(box.problems)
            self.wire.send(done=_record_json(record, folder), problems=problems)
        except DtprobeError as error:
            self.wire.send(failed=[error.message, error.remedy], usage=error.exit_code == 2)
        except Exception as error:  # noqa: BLE001  said on the other side, where somebody reads it
            self.wire.send(failed=[f"{type(error).__name__}: {error}", ""], usage=False)
        finally:
            ended.set()
            for thread in beside:
                thread.join(timeout=BEAT_S * 4)

    def _ship(self, shipper: Shipper, ended: threading.Event) -> None:
        while not ended.wait(BEAT_S) and not self._gone():
            shipper.ship()

    def _execute(self, box: Confinement, folder: Path, told: Mapping[str, Any]) -> ArmRecord:
        known = catalog.injectors()[0] if told["faults"] else {}
        plan = ArmPlan(
            told["name"],
            Workload(
                tuple(told["argv"]),
                Path(told["cwd"]),
                told["timeout_s"],
                told["world_size"],
                told["env"],
                tuple(told["hooks"]),
            ),
            told["repeat"],
            traced=told["traced"],
            probed=told["probed"],
            faults=tuple(parse(text, known, world_size=told["world_size"]) for text in told["faults"]),
        )
        master, port = told["master"]
        launcher = NodeRanks(
            seats=Seats(
                node=self.node,
                nodes=told["nodes"],
                ranks=tuple(told["ranks"]),
                master=(master, port),
                interface=interface_of(self._address),
            ),
            host=self.host,
            given=self._given,
            held=self._held,
            port=self._port,
            clock=self._clock,
        )
        probes: list[Probe] = [made(one) for one in told["probes"]]
        return armrun.execute(
            box,
            plan,
            folder=folder,
            probes=[*probes, Relay(self._tell, self._heard)],
            launcher=launcher,
            seed=told["seed"],
            environ=self.environ,
            clock=self._clock,
            elsewhere=frozenset(range(told["world_size"])) - set(told["ranks"]),
        )

    def _held(self, processes: Sequence[RankProcess]) -> None:
        self.wire.send(held=[[one.rank, one.pid] for one in processes])

    def _tell(self, reason: str) -> bool:
        return self.wire.send(suspected=reason)


def interface_of(address: str) -> str | None:
    """The network interface with an address; None where none has it."""
    return next((name for name, own in psutil.net_if_addrs().items() if any(one.address == address for one in own)), None)


def described(probe: Probe) -> dict[str, Any]:
    """A recorder's configuration as it goes over the wire: its class by name, its fields as JSON has them."""
    kind = type(probe)
    return {"kind": f"{kind.__module__}:{kind.__qualname__}", "fields": asdict(probe)}  # type: ignore[call-overload]


def made(said: Mapping[str, Any]) -> Probe:
    """The configuration that `described` gave."""
    module, _, name = said["kind"].partition(":")
    kind = getattr(importlib.import_module(module), name)
    known = {one.name for one in fields(kind)}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in said["fields"].items() if key in known}
    return kind(**given)


def _record_json(record: ArmRecord, folder: Path) -> dict[str, Any]:
    """The record as it goes over the wire; files by their names below the node's folder."""
    return {
        "started_ns": record.started_ns,
        "ended_ns": record.ended_ns,
        "exits": [asdict(one) for one in record.exits],
        "recorded": {
            name: {**asdict(one), "files": [str(file.relative_to(folder)) for file in one.files if file.is_relative_to(folder)]}
            for name, one in record.recorded.items()
            if name != Relay.name
        },
        "suspected": [list(one) for one in record.suspected],
        "injected": [
            {"fault": one.fault, "fired": [firing_json(hit) for hit in one.fired], "problems": list(one.problems)}
            for one in record.injected
        ],
    }


def main(environ: dict[str, str]) -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(signum).name)

    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, interrupt)
    told = json.loads(environ.pop(TOLD))
    os.environ.pop(TOLD, None)
    with suppress(KeyboardInterrupt):
        Agent(told, environ).serve()


if __name__ == "__main__":
    main(dict(os.environ))
