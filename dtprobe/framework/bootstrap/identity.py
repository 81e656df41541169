"""Who is in the job: every rank says who it is, and all learn the same list, or what is wrong with it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dtprobe.framework.agreement import Agreement, Said, named
from dtprobe.framework.bootstrap.placement import Placement
from dtprobe.framework.errors import RankError


class IdentityError(RankError):
    """The ranks that came are not a permutation of 0..n-1: one is claimed twice, or they disagree on how many there are."""


@dataclass(frozen=True)
class Peer:
    """What a rank said about itself."""

    rank: int
    host: str
    pid: int
    source: str

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host}, placed by {self.source})"


def verify(placement: Placement, store: Any, *, timeout_s: float) -> tuple[Peer, ...]:
    """All ranks of the job in order, agreed on by all of them over `store` (any c10d store that can append).

    Raises IdentityError on every rank as soon as two processes claim one rank or ranks differ in world size, and
    MissingRanks, on every rank that came, naming those that did not within `timeout_s` seconds.
    """
    agreement = Agreement(store, rank=placement.rank, members=tuple(range(placement.world_size)), prefix="dtprobe.identity")
    said = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "source": placement.source,
        "world_size": placement.world_size,
        "local_rank": placement.local_rank,
    }
    try:
        verdict = agreement.reach(said, _judge, timeout_s, what="start of the job", early=_contradiction)
    finally:
        agreement.close()
    if "wrong" in verdict:
        raise IdentityError(verdict["wrong"], verdict["remedy"], ranks=verdict["ranks"])
    return tuple(Peer(*each) for each in verdict["peers"])


def completed(placement: Placement, peers: tuple[Peer, ...]) -> Placement:
    """The placement with local rank, node rank and their totals filled in from the hosts of the peers where they were unknown."""
    hosts = list(dict.fromkeys(peer.host for peer in peers))
    here = [peer.rank for peer in peers if peer.host == peers[placement.rank].host]
    known = {
        "local_rank": (placement.local_rank, here.index(placement.rank)),
        "local_world_size": (placement.local_world_size, len(here)),
        "node_rank": (placement.node_rank, hosts.index(peers[placement.rank].host)),
        "nodes": (placement.nodes, len(hosts)),
    }
    return replace(placement, **{name: old if old is not None else new for name, (old, new) in known.items()})  # type: ignore[arg-type]


def _contradiction(heard: Mapping[int, list[Said]]) -> Said:
    everyone = [(rank, said) for rank, each in sorted(heard.items()) for said in each]
    twice = [rank for rank, each in heard.items() if len(each) > 1]
    if twice:
        claims = "; ".join(str(_peer(rank, said)) for rank, said in everyone if rank in twice)
        return {
            "wrong": f"{named(twice)} claimed by more than one process: {claims}",
            "remedy": "give each process a rank of its own",
            "ranks": twice,
        }
    sizes = {said["world_size"] for _, said in everyone}
    if len(sizes) > 1:
        claims = "; ".join(f"{_peer(rank, said)} says {said['world_size']}" for rank, said in everyone)
        return {
            "wrong": f"ranks disagree on the world size: {claims}",
            "remedy": "start all ranks with one world size",
            "ranks": [rank for rank, _ in everyone],
        }
    return {}


def _judge(heard: Mapping[int, list[Said]]) -> Said:
    return _contradiction(heard) or {
        "peers": [[rank, said["host"], said["pid"], said["source"]] for rank, (said,) in sorted(heard.items())]
    }


def _peer(rank: int, said: Said) -> Peer:
    return Peer(rank, said["host"], said["pid"], said["source"])
