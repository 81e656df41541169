"""Which process is which: ranks, hosts, process ids and GPUs, tied together from what the artifacts say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dtprobe.diagnose.case import Artifact, Event, Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a rank ran, as far as anything says so."""

    rank: int
    host: str | None = None
    local_rank: int | None = None
    pid: int | None = None
    gpu_bus: str | None = None


@dataclass(frozen=True, kw_only=True)
class Who:
    """The ranks of the job. `world_size` is None where nothing tells it; `seen` are the ranks that left any artifact or line."""

    world_size: int | None = None
    seats: tuple[Seat, ...] = ()
    seen: frozenset[int] = field(default_factory=frozenset)

    def at_pid(self, pid: int, host: str | None = None) -> Seat | None:
        """The rank of a process; None where none or several fit."""
        found = [one for one in self.seats if one.pid == pid and (host is None or one.host in (None, host))]
        return found[0] if len(found) == 1 else None

    def at_gpu(self, bus: str, host: str | None = None) -> Seat | None:
        """The rank on a GPU by its PCI bus id (`c1:00`, `0000:c1:00.0`, `c1000`); None where none or several fit."""
        wanted = bus_key(bus)
        found = [
            one
            for one in self.seats
            if one.gpu_bus and bus_key(one.gpu_bus) == wanted and (host is None or one.host in (None, host))
        ]
        return found[0] if len(found) == 1 else None


def bus_key(bus: str) -> str:
    """Bus and device of a PCI address in any notation: `0000:c1:00.0`, `c1:00`, NCCL's `c1000` -> `c100`."""
    plain = bus.lower().split(".")[0]
    parts = plain.split(":")
    if len(parts) == 1:
        return plain.zfill(5)[-5:-1].lstrip("0") if len(plain) > 4 else plain.lstrip("0")
    return (parts[-2] + parts[-1]).lstrip("0")


def identify(artifacts: Sequence[Artifact], lines: Sequence[Line], events: Sequence[Event]) -> Who:
    """Tie together what names, tags, NCCL init lines and elastic's tables say."""
    ranks: list[int | None] = [*(one.rank for one in artifacts), *(one.rank for one in lines), *(one.rank for one in events)]
    seen = {rank for rank in ranks if rank is not None}
    return Who(seen=frozenset(seen))
