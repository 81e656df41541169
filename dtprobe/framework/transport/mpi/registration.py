"""How torch gets at the transport: a back end of torch's, the variables that `env://` reads, and a group's creation."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dtprobe.framework.bootstrap.placement import Placement
from dtprobe.framework.transport.mpi import NAME
from dtprobe.framework.transport.mpi.engine import Engine, running
from dtprobe.framework.transport.mpi.errors import RankDisagreement
from dtprobe.framework.transport.mpi.group import REMEDY, MpiGroup, make_group


def agreed(engine: Engine, where: Placement) -> Placement:
    """This process's placement; where no launcher that the bootstrap knows spoke, MPI's word.

    Raises RankDisagreement when a launcher's variables say something else than MPI.
    """
    if (where.rank, where.world_size) == (engine.rank, engine.size):
        return where
    if where.source == "single":
        return replace(
            where,
            rank=engine.rank,
            world_size=engine.size,
            local_rank=None,
            local_world_size=None,
            node_rank=None,
            nodes=None,
            master_addr="",
            source="mpi",
            run="mpi",
        )
    raise RankDisagreement(
        f"{where} and MPI (rank {engine.rank} of {engine.size}) disagree", REMEDY, ranks=(where.rank, engine.rank)
    )


def announce(engine: Engine, where: Placement, environ: MutableMapping[str, str], timeout_s: float) -> None:
    """Set what torch's `env://` reads and nobody has set: rank 0 picks a free port and tells its address over MPI."""
    said = json.dumps([where.master_addr or socket.gethostname(), _free_port()]).encode() if engine.rank == 0 else b""
    address, port = json.loads(engine.tell_all(said, "register() on every rank", timeout_s))
    local = {"LOCAL_RANK": where.local_rank, "LOCAL_WORLD_SIZE": where.local_world_size} if where.source != "single" else {}
    found: Mapping[str, Any] = {
        "RANK": engine.rank,
        "WORLD_SIZE": engine.size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        **local,
    }
    for name, value in found.items():
        if value is not None:
            environ.setdefault(name, str(value))


def install() -> None:
    """Make the back end known to torch."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: Any) -> MpiGroup:
    """A group for torch."""
    size = options.group_size
    members = tuple(options.global_ranks_in_group) or tuple(range(size))
    timeout: timedelta = options.timeout
    return make_group(running(timeout.total_seconds()), options.group_id, members, options.group_rank, options.store, timeout)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
