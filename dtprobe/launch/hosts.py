"""The launcher whose nodes are namespaces of this host: several hosts as far as the network and their names go, on one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dtprobe import doctor
from dtprobe.confine import Confinement
from dtprobe.errors import Unavailable
from dtprobe.launch.nodes import SILENCE_S

if TYPE_CHECKING:
    from dtprobe.armrun import ArmPlan, ArmRecord
    from dtprobe.clock import Clock
    from dtprobe.scenario import Probe

NEEDS = ("root", "netns", "veth", "mount")


@dataclass(frozen=True, kw_only=True)
class OnHosts:
    """`nodes` nodes called node0, node1 and so on, the ranks in blocks. A node is given up after `silence_s` of silence.

    Each has its own network, host name and `/etc/hosts`; kernel, clock, pids, memory and files are this host's.
    """

    nodes: int = 2
    silence_s: float = SILENCE_S

    @property
    def name(self) -> str:
        return "hosts"

    def probe(self) -> Unavailable | None:
        return doctor.together(doctor.here().unmet(NEEDS))

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
        """Run an arm over the nodes. Raises DtprobeError where they cannot be made or do not come up."""
        from dtprobe.launch.nodes.conductor import Conductor
        from dtprobe.launch.nodes.spaces import Spaces

        ground = Spaces(box, folder, self.nodes, environ)
        conductor = Conductor(box, plan, ground, folder=folder, silence_s=self.silence_s, seed=seed, clock=clock)
        return conductor.execute(probes, environ)
