"""RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by hand or by a script, as torch's `env://` reads them."""

from __future__ import annotations

from collections.abc import Mapping

from dtprobe.framework.bootstrap.launchers import pytorchjob, torchrun
from dtprobe.framework.bootstrap.placement import Partial, Placement, meeting_point, read, whole_number

_ALL = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")


def claim(environ: Mapping[str, str]) -> Placement | Partial | None:
    if environ.get(torchrun.MARKER) or pytorchjob.is_pytorchjob(environ):
        return None  # the same variables, but theirs
    seen = read(environ, *_ALL)
    if environ.get("JOB_COMPLETION_INDEX") and "RANK" not in seen:
        return None  # WORLD_SIZE is the manifest's, part of the indexed Job's claim
    if not seen:
        return None
    rank, world_size, local_rank, local_size, node_rank = (whole_number(environ, name) for name in _ALL)
    meeting = meeting_point(environ)
    if rank is None or world_size is None or meeting.addr is None or meeting.port is None:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        return Partial("explicit", rank, world_size, tuple(missing), seen)
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=node_rank,
        nodes=None,
        master_addr=meeting.addr,
        master_port=meeting.port,
        source="explicit",
        run=f"{meeting.addr}:{meeting.port}",
        read=seen,
    )


def runs_inside(claim: Placement, outer: Placement | Partial, environ: Mapping[str, str]) -> bool:
    """What is set by hand proves nothing about who started whom."""
    return False
