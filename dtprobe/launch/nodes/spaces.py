"""Nodes that are namespaces of this host: each has a network, a cable to a switch, a host name and an `/etc/hosts` of its own.

Nothing is made in the machine's own network namespace, so the addresses are private to the run; the conductor listens at the switch.
What nodes share is the kernel with its one clock, the file system, pids and memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtprobe.confine import Child, Confinement
from dtprobe.errors import DtprobeError, UsageError
from dtprobe.launch.nodes import TOLD
from dtprobe.launch.nodes.ground import AGENT, Attached, Call, last_words

SUBNET = "10.89.0."
SWITCH = f"{SUBNET}254"
DEVICE = "dtp0"
MOST = 64
ENTER = Path(__file__).with_name("enter.py")
CLONE_NEWNET = 0x40000000
COMMAND_S = 20.0
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""The caller's interfaces are not there; an agent names the ranks their node's own."""


class Spaces:
    """The nodes of one arm run. `close` removes what the ledger of `box` would remove at the latest."""

    def __init__(self, box: Confinement, folder: Path, nodes: int, environ: Mapping[str, str]) -> None:
        if nodes > MOST:
            raise UsageError(f"{nodes} nodes are more than the {MOST} that one switch takes", "take fewer nodes")
        self.nodes = nodes
        self.names = tuple(f"node{node}" for node in range(nodes))
        self._box = box
        self._environ = environ
        self._prefix = prefix(box.run_id, folder)
        self._tickets: list[int] = []
        self._hosts = box.scratch / f"{self._prefix}-hosts"
        self._agents: dict[Path, Child] = {}

    def build(self) -> tuple[socket.socket, str]:
        spaces = [self._space(name) for name in ("sw", *self.names)]
        for space in spaces:
            self._tickets.append(self._box.undo("netns", name=space))
        _ip([], [f"netns add {space}" for space in spaces])
        bridge = ["link set lo up", "link add bridge type bridge", f"addr add {SWITCH}/24 dev bridge", "link set bridge up"]
        cables = [
            line
            for node, name in enumerate(self.names)
            for line in (
                f"link add port{node} type veth peer name {DEVICE} netns {self._space(name)}",
                f"link set port{node} master bridge up",
            )
        ]
        _ip(["-n", self._space("sw")], [*bridge, *cables])
        for node, name in enumerate(self.names):
            own = ["link set lo up", f"addr add {_address(node)}/24 dev {DEVICE}", f"link set {DEVICE} up"]
            _ip(["-n", self._space(name)], own)
        known = [f"{_address(node)} {name}" for node, name in enumerate(self.names)]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", f"{SWITCH} switch", *known, ""]), encoding="ascii")
        return _listening(self._space("sw")), SWITCH

    def start(self, call: Call, folder: Path, attached: Mapping[int, Attached]) -> None:
        for node, name in enumerate(self.names):
            # A node's journals and temporary files go with the run, also those of a node that was lost with its own warden.
            state = self._box.scratch / name
            state.mkdir(exist_ok=True)
            env = {
                **{key: value for key, value in self._environ.items() if key not in INTERFACES},
                "XDG_STATE_HOME": str(state),
                "TMPDIR": str(state),
                TOLD: call.told(node=node, name=name),
            }
            argv: tuple[str, ...] = (sys.executable, "-m", AGENT)
            if node in attached:
                argv, env = attached[node].wrap(argv), {**env, **attached[node].environ(env)}
            front = (sys.executable, "-I", "-S", str(ENTER), self._space(name), name, str(self._hosts))
            log = folder / name
            log.mkdir(parents=True, exist_ok=True)
            self._agents[log / "stderr.log"] = self._box.spawn(
                (*front, *argv), env=env, cwd=Path("/"), stdout=log / "stdout.log", stderr=log / "stderr.log", held=False
            )

    def failed(self) -> str:
        ended = [log for log, child in self._agents.items() if self._box.poll(child) is not None]
        return f"the agent of {ended[0].parent.name} ended: {last_words(ended[0]) or 'it said nothing'}" if ended else ""

    def close(self) -> None:
        for ticket in reversed(self._tickets):
            self._box.revert(ticket)
        self._hosts.unlink(missing_ok=True)

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"


def prefix(run_id: str, folder: Path) -> str:
    """What the network namespaces of an arm run begin with."""
    return f"dtn{hashlib.sha256(f'{run_id} {folder}'.encode()).hexdigest()[:10]}"


def _address(node: int) -> str:
    return f"{SUBNET}{node + 1}"


def _ip(options: Sequence[str], lines: Sequence[str]) -> None:
    """Several commands of iproute2 at once. Raises DtprobeError with its own words."""
    try:
        done = subprocess.run(
            ["ip", *options, "-batch", "-"],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DtprobeError(f"nodes in network namespaces cannot be made: ip: {error}", "see `dtprobe doctor`: veth") from error
    if done.returncode:
        raise DtprobeError(
            f"nodes in network namespaces cannot be made: ip: {done.stderr.strip()[:300]}", "see `dtprobe doctor`: veth"
        )


def _listening(space: str) -> socket.socket:
    """A socket that listens in a network namespace: it belongs to where it was made, whoever accepts on it.

    Made in a thread of its own, which ends there: no thread of ours has to find its way back.
    """
    made: list[socket.socket | OSError] = []

    def make() -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            descriptor = os.open(f"/run/netns/{space}", os.O_RDONLY | os.O_CLOEXEC)
            if libc.setns(descriptor, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            os.close(descriptor)
            made.append(socket.create_server((SWITCH, 0)))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make, name="dtprobe-listen")
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise DtprobeError(f"cannot listen in the network namespace {space}: {made[0].strerror}", "see `dtprobe doctor`: netns")
    return made[0]
