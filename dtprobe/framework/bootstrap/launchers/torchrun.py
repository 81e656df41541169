"""torchrun (torch.distributed.run): sets RANK and its kin for each worker, and marks them with TORCHELASTIC_RUN_ID.

Source: torch/distributed/elastic/agent/server/local_elastic_agent.py, `_start_workers` (torch 2.9 to 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping

from dtprobe.framework.bootstrap.placement import Partial, Placement, PlacementError, meeting_point, read, whole_number

MARKER = "TORCHELASTIC_RUN_ID"
_ALL = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")  # all set since torch 1.9


def claim(environ: Mapping[str, str]) -> Placement | Partial | None:
    if not environ.get(MARKER):
        return None
    numbers = {name: whole_number(environ, name) for name in _ALL}
    meeting = meeting_point(environ)
    missing = [name for name, value in numbers.items() if value is None]
    missing += [name for name, value in (("MASTER_ADDR", meeting.addr), ("MASTER_PORT", meeting.port)) if value is None]
    seen = read(environ, *_ALL, MARKER)
    rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
    if missing or rank is None or world_size is None or meeting.addr is None:
        return Partial("torchrun", rank, world_size, tuple(missing), seen)
    role = (whole_number(environ, "ROLE_RANK"), whole_number(environ, "ROLE_WORLD_SIZE"))
    if role[1] == world_size and role[0] not in (None, rank):
        raise PlacementError(
            f"torchrun: RANK={rank} but ROLE_RANK={role[0]} in one role of {world_size}",
            "RANK was overwritten after torchrun set it",
        )
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=numbers["LOCAL_RANK"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        node_rank=numbers["GROUP_RANK"],
        nodes=numbers["GROUP_WORLD_SIZE"],
        master_addr=meeting.addr,
        master_port=meeting.port,
        source="torchrun",
        run=environ[MARKER],
        attempt=whole_number(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        read=seen,
    )


def runs_inside(claim: Placement, outer: Placement | Partial, environ: Mapping[str, str]) -> bool:
    """One agent is one task of the outer launcher: as many agents met as it has tasks, or this task is one of them.

    Four torchruns under `srun -n4` that do not meet are four jobs of world size 1, each sure of itself; not nested then.
    """
    if outer.world_size is not None and outer.world_size != claim.nodes:
        return False
    return outer.rank is None or claim.nodes is None or outer.rank < claim.nodes
