"""The ranks of one node of a job: started as the local launcher starts all, but let go, and given up, by the conductor's word."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dtprobe.clock import Clock, SystemClock
from dtprobe.confine import Confinement
from dtprobe.errors import DtprobeError, Unavailable
from dtprobe.launch import JobSpec, RankExit, ReservedPort
from dtprobe.launch.local import LocalJob, start_ranks
from dtprobe.launch.nodes import Seats
from dtprobe.probes import RankProcess


class Given:
    """The conductor's words to a node's job: `go` once all nodes are held, `over` with a reason where it is not to go on."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.over = ""

    def stop(self, why: str) -> None:
        self.over = self.over or why
        self.go.set()

    def check(self) -> None:
        """Raises DtprobeError where it is over."""
        if self.over:
            raise DtprobeError(self.over)


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """Starts the ranks of `seats` and tells `held` of them. `port` is the store's, where this node has rank 0."""

    seats: Seats
    host: str
    given: Given
    held: Callable[[Sequence[RankProcess]], None]
    port: ReservedPort | None = None
    clock: Clock = field(default_factory=SystemClock)

    @property
    def name(self) -> str:
        return "node"

    def probe(self) -> Unavailable | None:
        return None

    def start(self, box: Confinement, spec: JobSpec) -> NodeJob:
        """Create this node's ranks, held. Raises DtprobeError as the local launcher does."""
        seats = self.seats
        placed = {
            "LOCAL_WORLD_SIZE": str(len(seats.ranks)),
            "NODE_RANK": str(seats.node),
            "NNODES": str(seats.nodes),
            "MASTER_ADDR": seats.master[0],
            "MASTER_PORT": str(seats.master[1]),
        }
        if seats.interface is not None and "GLOO_SOCKET_IFNAME" not in spec.env:
            placed["GLOO_SOCKET_IFNAME"] = seats.interface
        return start_ranks(NodeJob(box, spec, self), seats.ranks, placed)


class NodeJob(LocalJob):
    """The ranks of one node under way."""

    def __init__(self, box: Confinement, spec: JobSpec, launcher: NodeRanks) -> None:
        super().__init__(box, spec, launcher.port, launcher.clock, launcher.host)
        self._given = launcher.given
        self._held = launcher.held

    def release(self) -> None:
        """Say that the ranks are held, wait for the word, let them go."""
        self._held(self.processes())
        self._given.go.wait()
        self._given.check()
        super().release()

    def wait(self, deadline_s: float, tick: Callable[[], None] | None = None) -> list[RankExit]:
        def look() -> None:
            self._given.check()
            if tick is not None:
                tick()

        return super().wait(deadline_s, look)
