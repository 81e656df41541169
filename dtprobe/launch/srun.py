"""The launcher whose nodes are Slurm's: one agent a node, started by `srun` in the allocation this runs in, or in one of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dtprobe import doctor
from dtprobe.confine import Child, Confinement
from dtprobe.errors import DtprobeError, Unavailable
from dtprobe.launch import LOOPBACK
from dtprobe.launch.nodes import SILENCE_S, TOLD
from dtprobe.launch.nodes.ground import AGENT, Attached, Call, last_words

if TYPE_CHECKING:
    from dtprobe.armrun import ArmPlan, ArmRecord
    from dtprobe.clock import Clock
    from dtprobe.scenario import Probe

ASK_S = 20.0


@dataclass(frozen=True, kw_only=True)
class OnSlurm:
    """`nodes` nodes of the cluster, the ranks in blocks; `options` are further words for srun (a partition, say).

    The program and this Python have to be on the nodes; the run folder need not.
    """

    nodes: int = 2
    silence_s: float = SILENCE_S
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "slurm"

    def probe(self) -> Unavailable | None:
        return doctor.capability("command:srun")

    def conduct(
        self,
        box: Confinement,
        plan: ArmPlan,
        *,
        folder: Path,
        probes: Sequence[Probe],
        seed: int,
        environ: Mapping[str, str],
        clock: Clock,
    ) -> ArmRecord:
        """Run an arm over the nodes. Raises DtprobeError where no cluster answers or the nodes do not come up."""
        from dtprobe.launch.nodes.conductor import Conductor

        ground = Allocation(box, self.nodes, self.options, environ)
        conductor = Conductor(box, plan, ground, folder=folder, silence_s=self.silence_s, seed=seed, clock=clock)
        return conductor.execute(probes, environ)


class Allocation:
    """The nodes of one arm run in Slurm."""

    def __init__(self, box: Confinement, nodes: int, options: Sequence[str], environ: Mapping[str, str]) -> None:
        self.nodes = nodes
        self._box = box
        self._options = tuple(options)
        self._environ = environ
        self._child: Child | None = None
        self._log = Path()

    def build(self) -> tuple[socket.socket, str]:
        if shutil.which("srun", path=self._environ.get("PATH")) is None:
            raise DtprobeError("srun is not on PATH", "load Slurm's module, or use the launcher hosts")
        address = self._own_address(self._controller())
        return socket.create_server(("" if address != LOOPBACK else LOOPBACK, 0)), address

    def start(self, call: Call, folder: Path, attached: Mapping[int, Attached]) -> None:
        if attached:
            # srun starts the same program on every node: what is to differ would have to be told apart there
            raise DtprobeError("faults of a whole node need the launcher hosts", "aim by rank, or use hosts")
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "stderr.log"
        argv = (
            *("srun", f"--nodes={self.nodes}", f"--ntasks={self.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=0"),
            *("--no-kill", "--wait=0", "--export=ALL", "--input=none", "--label", *self._options),
            *(sys.executable, "-m", AGENT),
        )
        env = {**self._environ, TOLD: call.told()}
        self._child = self._box.spawn(argv, env=env, cwd=Path("/"), stdout=folder / "stdout.log", stderr=self._log, held=False)

    def failed(self) -> str:
        if self._child is None or self._box.poll(self._child) is None:
            return ""
        return f"srun ended: {last_words(self._log) or 'it said nothing'}"

    def close(self) -> None:
        """Nothing stays: the step ended with srun."""

    def _controller(self) -> tuple[str, int]:
        """Where the cluster's controller is: whoever reaches it is reached from the cluster by the same interface."""
        try:
            done = subprocess.run(
                ["scontrol", "show", "config"],
                env=dict(self._environ),
                capture_output=True,
                text=True,
                timeout=ASK_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DtprobeError(f"no Slurm answers: scontrol: {error}", "run it where srun works") from error
        told = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
        told = {key.strip(): value.strip() for key, value in told.items()}
        host = next((value.partition("(")[0] for key, value in told.items() if key.startswith("SlurmctldHost")), "")
        if done.returncode or not host:
            raise DtprobeError(
                f"no Slurm answers: {done.stderr.strip()[:300] or 'no controller is named'}", "run it where srun works"
            )
        return host, int(told.get("SlurmctldPort", "6817").partition("-")[0] or 6817)

    def _own_address(self, controller: tuple[str, int]) -> str:
        """The address of the interface that leads there; nothing is sent."""
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
                way.connect(controller)
                return str(way.getsockname()[0])
        except OSError as error:
            raise DtprobeError(f"Slurm's controller {controller[0]}:{controller[1]} is not reached: {error}") from error
