"""NCCL's log, process by process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from dtprobe.diagnose.case import Line
from dtprobe.diagnose.seen.places import Places
from dtprobe.readers import nccl_log
from dtprobe.readers.nccl_log import Call, Making


@dataclass(kw_only=True)
class NcclProcess:
    """What NCCL said in one process, each with its line. `rank` is the job's rank, where known. `order` is that of its first line."""

    host: str
    pid: int
    order: int
    rank: int | None = None
    device: int | None = None
    """The GPU of most of its lines, as the process numbers them."""
    version: tuple[str, Line] | None = None
    makings: list[tuple[Making, Line]] = field(default_factory=list)
    calls: list[tuple[Call, str, Line]] = field(default_factory=list)
    """Each call with its communicator's id."""
    warnings: list[tuple[str, Line]] = field(default_factory=list)
    refused: list[tuple[str, str, Line]] = field(default_factory=list)
    """Address with port, and why the connection failed."""
    last: Line | None = None

    @property
    def destroyed(self) -> bool:
        """Whether it destroyed its communicators, and aborted none."""
        phases = {made.phase for made, _line in self.makings}
        return "Destroy COMPLETE" in phases and not any(phase.startswith("Abort") for phase in phases)

    def begun(self) -> dict[str, tuple[Making, Line]]:
        """Communicators that this process began to make and did not finish, by id."""
        found: dict[str, tuple[Making, Line]] = {}
        for made, line in self.makings:
            key = key_of(made)
            if made.phase == "Init START":
                found[key] = made, line
            elif made.phase == "Init COMPLETE":
                found.pop(key, None)
        return found


def key_of(made: Making) -> str:
    """A communicator's id as 16 digits; where the log has none, its address, which only holds within the process."""
    return f"{int(made.comm_id, 16):016x}" if made.comm_id else made.comm


def take(lines: Iterable[Line]) -> list[NcclProcess]:
    """The processes in the order in which they first say something."""
    found: dict[tuple[str, int], NcclProcess] = {}
    ids: dict[tuple[str, int, str], str] = {}
    for line in lines:
        said = nccl_log.split(line.raw)
        if said is None:
            continue
        process = found.get((said.host, said.pid))
        if process is None:
            process = NcclProcess(host=said.host, pid=said.pid, order=len(found), rank=line.rank)
            found[said.host, said.pid] = process
        process.last = line
        process.device = said.device if process.device is None else process.device
        if call := nccl_log.call(said.text):
            comm = ids.get((said.host, said.pid, call.comm), call.comm)
            process.calls.append((call, comm, line))
        elif made := nccl_log.making(said.text):
            if made.phase.startswith("Init"):
                ids[said.host, said.pid, made.comm] = _shared_id(made, process)
            process.makings.append((made, line))
        elif said.level == "WARN":
            process.warnings.append((said.text, line))
        elif version := nccl_log.version(said.text):
            process.version = process.version or (version, line)
        if refused := nccl_log.refused(said.text):
            address, port, why = refused
            process.refused.append((f"{address}:{port}" if port else address, why, line))
    _join(list(found.values()))
    return list(found.values())


def _join(processes: Sequence[NcclProcess]) -> None:
    """Give calls whose communicator was made before the log begins an id that the other ranks of it have, too.

    Of one size a process has mostly one communicator: these are the same where no more processes have it than it has places, and at
    most one id of it is known. Where a process has several of a size, the order in which they are first called must do.
    """
    addresses: dict[int, list[list[str]]] = {}
    for one in processes:
        sizes: dict[int, list[str]] = {}
        for call, comm, _line in one.calls:
            if comm not in sizes.setdefault(call.nranks, []):
                sizes[call.nranks].append(comm)
        for size, comms in sizes.items():
            addresses.setdefault(size, []).append(comms)
    for size, each in addresses.items():
        known = {comm for comms in each for comm in comms if not comm.startswith("0x")}
        if all(not comm.startswith("0x") for comms in each for comm in comms) or len(each) > max(size, 1):
            continue
        single = all(len(comms) == 1 for comms in each)
        if (single and len(known) > 1) or (not single and known):
            continue
        named = next(iter(known), None)
        for one in processes:
            own = list(dict.fromkeys(comm for call, comm, _line in one.calls if call.nranks == size))
            ids = {comm: named or f"{size} ranks, {number + 1}. called" for number, comm in enumerate(own)}
            one.calls = [(call, ids.get(comm, comm) if call.nranks == size else comm, line) for call, comm, line in one.calls]


def _shared_id(made: Making, process: NcclProcess) -> str:
    """An id that all ranks of the communicator have. Logs before NCCL 2.17 show none: there the order of making must do."""
    if made.comm_id:
        return key_of(made)
    before = {one.comm for one, _ in process.makings if one.nranks == made.nranks and one.comm != made.comm}
    return f"{made.nranks} ranks, number {len(before)}"


def placed(process: NcclProcess, places: Places) -> NcclProcess:
    """The same with its rank."""
    rank = places.rank(process.pid, process.host)
    return replace(process, rank=rank if rank is not None else process.rank)
