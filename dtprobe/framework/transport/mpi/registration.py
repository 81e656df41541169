"""How torch gets at the transport: a back end of torch's, the variables that `env://` reads, and a group's creation."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from mpi4py import MPI

from dtprobe.framework.agreement import Agreement, Said, named
from dtprobe.framework.bootstrap.placement import Placement
from dtprobe.framework.errors import GroupFailed
from dtprobe.framework.transport.mpi import NAME
from dtprobe.framework.transport.mpi.engine import Channel, Engine, running
from dtprobe.framework.transport.mpi.errors import RankDisagreement
from dtprobe.framework.transport.mpi.group import MpiGroup

_REMEDY = "start every rank with mpirun, and take rank and world size from MPI (register() sets RANK and WORLD_SIZE)"


def agree(engine: Engine, where: Placement) -> None:
    """Raise RankDisagreement when a launcher's variables say something else than MPI."""
    if where.source == "single":
        return  # no variables: MPI alone speaks
    if (where.rank, where.world_size) != (engine.rank, engine.size):
        raise RankDisagreement(
            f"{where} and MPI (rank {engine.rank} of {engine.size}) disagree", _REMEDY, ranks=(where.rank, engine.rank)
        )


def announce(engine: Engine, where: Placement, environ: MutableMapping[str, str], timeout_s: float) -> None:
    """Set what torch's `env://` reads and nobody has set: rank 0 picks a free port and tells its address over MPI."""
    said = json.dumps([where.master_addr or socket.getfqdn(), _free_port()]).encode() if engine.rank == 0 else b""
    room = bytearray(said.ljust(512))
    what = "register() on every rank"
    engine.call(what, lambda: engine.until(MPI.COMM_WORLD.Ibcast([room, MPI.BYTE], 0), what, timeout_s), timeout_s + 5)
    address, port = json.loads(bytes(room))
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
    """A group for torch: all members agree first, over its store, so that a missing or mistaken rank is named in time."""
    timeout: timedelta = options.timeout
    timeout_s = timeout.total_seconds()
    engine = running(timeout_s)
    rank, size = options.group_rank, options.group_size
    members = tuple(options.global_ranks_in_group) or tuple(range(size))
    channel = Channel(name=options.group_id, shown=options.group_id, members=members)
    _meet(engine, channel, rank, options.store, timeout_s)

    def make() -> Any:
        group = MPI.COMM_WORLD.Get_group().Incl(members)
        comm = MPI.COMM_WORLD.Create_group(group)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        engine.channels[channel.name] = channel
        return comm

    try:
        channel.comm = engine.call(f"creation of group {channel.name!r}", make, timeout_s)
    except MPI.Exception as error:
        raise GroupFailed(f"MPI could not make group {channel.name!r}: {error.Get_error_string()}", ranks=members) from None
    return MpiGroup(engine, channel, options.store, rank, timeout)


def _meet(engine: Engine, channel: Channel, rank: int, store: Any, timeout_s: float) -> None:
    mine = channel.members[rank]
    said = {"torch": mine, "mpi": engine.rank, "size": engine.size, "needs": max(channel.members) + 1}
    if len(channel.members) == 1:
        verdict = _judge({mine: [said]})
    else:
        agreement = Agreement(store, rank=mine, members=channel.members, prefix="dtprobe.mpi")
        try:
            verdict = agreement.reach(said, _judge, timeout_s, what=f"creation of group {channel.name!r}")
        finally:
            agreement.close()
    if verdict:
        raise RankDisagreement(verdict["wrong"], _REMEDY, ranks=verdict["ranks"])


def _judge(heard: Mapping[int, list[Said]]) -> Said:
    wrong = {
        rank: f"torch says rank {rank}, MPI says rank {said['mpi']} of {said['size']}"
        for rank, each in sorted(heard.items())
        for said in each
        if said["mpi"] != rank or said["needs"] > said["size"]
    }
    twice = [rank for rank, each in heard.items() if len(each) > 1]
    if twice:
        return {"ranks": twice, "wrong": f"two processes claim to be {named(twice)}"}
    return {"ranks": list(wrong), "wrong": "; ".join(wrong.values())} if wrong else {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
