"""PMI: MPICH's and Intel MPI's mpirun (Hydra), and `srun --mpi=pmi2`: PMI_RANK, PMI_SIZE.

Hydra adds MPI_LOCALRANKID and MPI_LOCALNRANKS. PMIx alone gives a rank and no size, which is no claim.
Source: MPICH, src/pm/hydra/proxy/pmip_cb.c; Slurm, src/plugins/mpi/pmi2/mpi_pmi2.c.
"""

from __future__ import annotations

from collections.abc import Mapping

from dtprobe.framework.bootstrap.placement import Partial, Placement, meeting_point, read, whole_number

_ALL = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMIX_RANK")


def claim(environ: Mapping[str, str]) -> Placement | Partial | None:
    rank, world_size, local_rank, local_size, pmix_rank = (whole_number(environ, name) for name in _ALL)
    seen = read(environ, *_ALL)
    if not seen:
        return None
    if rank is None and world_size is None:
        return Partial("pmix", pmix_rank, None, ("OMPI_COMM_WORLD_SIZE",), seen)
    if (rank, world_size) == (whole_number(environ, "SLURM_PROCID"), whole_number(environ, "SLURM_STEP_NUM_TASKS")):
        return None  # srun's own pmi2 plug-in: Slurm's claim is the same and says more
    if rank is None or world_size is None:
        missing = [name for name in _ALL[:2] if name not in seen]
        return Partial("pmi", rank, world_size, tuple(missing), seen)
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
        source="pmi",
        run=environ.get("PMI_JOBID", ""),
        read=seen,
    )


def runs_inside(claim: Placement, outer: Placement | Partial, environ: Mapping[str, str]) -> bool:
    """As for Open MPI: one Hydra as the only task of a Slurm step."""
    return outer.source == "slurm" and outer.world_size == 1
