"""A Kubernetes Indexed Job: JOB_COMPLETION_INDEX is the rank, one process a pod; the manifest must set WORLD_SIZE and MASTER_ADDR.

Source: kubernetes.io, "Indexed Job for parallel processing with static work assignment". Kubernetes itself tells a pod its index only.
"""

from __future__ import annotations

from collections.abc import Mapping

from dtprobe.framework.bootstrap.launchers import torchrun
from dtprobe.framework.bootstrap.placement import Partial, Placement, meeting_point, read, whole_number

PORT = 29500
"""torch's customary port: each pod has a network of its own, so it cannot be taken."""


def claim(environ: Mapping[str, str]) -> Placement | Partial | None:
    index = whole_number(environ, "JOB_COMPLETION_INDEX")
    if index is None:
        return None
    if environ.get(torchrun.MARKER):  # WORLD_SIZE is torchrun's then
        return Partial("indexed job", index, None, ("WORLD_SIZE",), read(environ, "JOB_COMPLETION_INDEX"))
    seen = read(environ, "JOB_COMPLETION_INDEX", "WORLD_SIZE")
    world_size = whole_number(environ, "WORLD_SIZE")
    meeting = meeting_point(environ)
    if world_size is None or meeting.addr is None:
        missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR") if not environ.get(name)]
        return Partial("indexed job", index, world_size, tuple(missing), seen)
    return Placement(
        rank=index,
        world_size=world_size,
        local_rank=0,
        local_world_size=1,
        node_rank=index,
        nodes=world_size,
        master_addr=meeting.addr,
        master_port=meeting.port or PORT,
        source="indexed job",
        run=f"{meeting.addr}:{meeting.port or PORT}",
        read=seen,
    )


def runs_inside(claim: Placement, outer: Placement | Partial, environ: Mapping[str, str]) -> bool:
    """Pods are the outermost level."""
    return False
