"""Open MPI's mpirun (4.x and 5.x): OMPI_COMM_WORLD_*. Its NODE_RANK counts processes of a node, not nodes: not used.

Source: Open MPI manual, "Environment variables set for the application"; `mpirun -n 2 env` under 5.0.11.
"""

from __future__ import annotations

from collections.abc import Mapping

from dtprobe.framework.bootstrap.placement import Partial, Placement, meeting_point, read, whole_number

_ALL = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


def claim(environ: Mapping[str, str]) -> Placement | Partial | None:
    rank, world_size, local_rank, local_size = (whole_number(environ, name) for name in _ALL)
    seen = read(environ, *_ALL)
    if not seen:
        return None
    if rank is None or world_size is None or local_rank is None or local_size is None:
        return Partial("mpirun", rank, world_size, tuple(name for name in _ALL if name not in seen), seen)
    here = local_size == world_size
    meeting = meeting_point(environ)
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=0 if here else None,
        nodes=1 if here else None,
        master_addr=meeting.addr or ("127.0.0.1" if here else ""),
        master_port=meeting.port,
        source="mpirun",
        run=next((environ[name] for name in _JOB if environ.get(name)), ""),
        read=seen,
    )


def runs_inside(claim: Placement, outer: Placement | Partial, environ: Mapping[str, str]) -> bool:
    """mpirun starts its daemons through srun, one a node; or it is itself the only task of a step.

    A job that fits on one node beside a step of several tasks is one of several mpiruns that do not know each other.
    """
    if outer.source != "slurm" or outer.world_size is None:
        return False
    if outer.world_size == 1:
        return True
    nodes = whole_number(environ, "SLURM_STEP_NUM_NODES")
    return claim.local_world_size != claim.world_size and nodes is not None and outer.world_size <= nodes
