"""Ranks on several nodes: on each an agent, which runs its part of an arm under its own confinement and its own recorders.

    ground (hosts, srun)       where nodes come from: network namespaces of this host, or the nodes of a Slurm allocation
    agent                      the program on a node: starts the node's ranks, records them, sends what they leave
    conductor                  this side: brings the agents up, lets the ranks go together, gathers, gives up a node that is silent
    exchange                   how far a node's clock is off, before, during and after the run
    wire, shipping             one connection a node: JSON lines; artifacts as they grow

No shared file system is needed but for the program itself. A node is given up when nothing came from it for `silence_s`; an agent that
hears nothing takes its node down by itself. Clocks are compared between this program and the agents, so an offset is that of the
node's processes: in namespaces of one kernel there is one clock, and `clock:skew,node=K` shifts it for a node's processes in libc.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtprobe.errors import UsageError

TOLD = "DTPROBE_NODE"
"""Environment variable of an agent: a JSON object that says where to call and how it is named. The ranks do not get it."""

SILENCE_S = 10.0
BEAT_S = 0.5
COME_S = 60.0
"""How long the agents may take to call: they import what the recorders need."""

STOP_S = 40.0
"""How long a node may take to stop its recorders and send what is left, after its ranks have ended."""


@dataclass(frozen=True, kw_only=True)
class Seats:
    """Where a node's ranks find each other: `ranks` of the job run here, rank 0's store is at `master`, `interface` leads there."""

    node: int
    nodes: int
    ranks: tuple[int, ...]
    master: tuple[str, int]
    interface: str | None


def split(world_size: int, nodes: int) -> list[tuple[int, ...]]:
    """The ranks of each node: blocks in order, as launchers deal them, the first ones larger where it does not come out even.

    Raises UsageError for fewer ranks than nodes.
    """
    if world_size < nodes:
        raise UsageError(f"{world_size} ranks cannot run on {nodes} nodes", f"take at least {nodes} ranks, or fewer nodes")
    base, more = divmod(world_size, nodes)
    found, first = [], 0
    for node in range(nodes):
        count = base + (node < more)
        found.append(tuple(range(first, first + count)))
        first += count
    return found
