"""Which rank a process is: by what the job's own lines say, else by what NCCL and RAS say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtprobe.diagnose.who import Who

if TYPE_CHECKING:
    from dtprobe.diagnose.seen.nccl import NcclProcess
    from dtprobe.diagnose.seen.ras import Answer


@dataclass(frozen=True, kw_only=True)
class Places:
    """Ranks by process number. A number that two hosts share is not in it."""

    who: Who
    ranks: dict[int, int]
    world_size: int | None

    @classmethod
    def of(cls, who: Who, processes: Iterable[NcclProcess], answers: Iterable[Answer]) -> Places:
        """Join them. A rank in a communicator is the job's rank only where the communicator is as large as the job."""
        processes = list(processes)
        said = [
            (one.pid, made.rank, made.nranks) for one in processes for made, _ in one.makings if made.phase.startswith("Init")
        ]
        said += [
            (peer.pid, rank, comm.size)
            for answer in answers
            for comm in answer.report.communicators
            if comm.size
            for rank, peer in comm.peers.items()
            if peer.pid is not None
        ]
        called = [call.nranks for one in processes for call, _, _ in one.calls]
        world = who.world_size or max((*(size for _, _, size in said), *called), default=None)
        ranks: dict[int, set[int]] = {}
        for pid, rank, size in said:
            if size == world:
                ranks.setdefault(pid, set()).add(rank)
        if not said:
            ranks = {pid: {device} for pid, device in _by_device(processes).items()}
        return cls(who=who, ranks={pid: min(one) for pid, one in ranks.items() if len(one) == 1}, world_size=world)

    def rank(self, pid: int | None, host: str | None = None) -> int | None:
        """The rank of a process."""
        if pid is None:
            return None
        seat = self.who.at_pid(pid, host) or self.who.at_pid(pid)
        return seat.rank if seat is not None else self.ranks.get(pid)


def _by_device(processes: Iterable[NcclProcess]) -> dict[int, int]:
    """The GPU of each process, where calls alone are logged and every process of one host is a rank of its own GPU."""
    logged = [one for one in processes if one.calls]
    devices = {one.pid: one.device for one in logged if one.device is not None and one.device >= 0}
    sizes = {call.nranks for one in logged for call, _, _ in one.calls}
    alone = len({one.host for one in logged}) == 1 and max(sizes, default=0) > max(devices.values(), default=0)
    return devices if alone and len(set(devices.values())) == len(logged) else {}
