"""Which process is which: ranks, hosts, process ids and GPUs, tied together from what the artifacts say."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dtprobe.diagnose import bindings
from dtprobe.diagnose.case import Artifact, Event, Line
from dtprobe.diagnose.placing import Places, Section, blocks, places


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a rank ran, as far as anything says so. A rank that was started again has a seat for each process."""

    rank: int
    host: str | None = None
    local_rank: int | None = None
    pid: int | None = None
    gpu_bus: str | None = None


@dataclass(frozen=True, kw_only=True)
class Who:
    """The ranks of the job. `world_size` is None where nothing tells it; `seen` are the ranks that left any artifact or line.

    `world_size_from` says how the size is known. `one_host`: nothing speaks for more than one, so that a local rank is the rank.
    `files` and `hosts` (pods) are those of one process each, with its rank. `locals` are the ranks of local ranks by artifact, where
    it tells which node it is of. `pods` are other names of a pod: its address, its node. `several`: more than one node is spoken of.
    """

    world_size: int | None = None
    world_size_from: str = ""
    seats: tuple[Seat, ...] = ()
    seen: frozenset[int] = field(default_factory=frozenset)
    one_host: bool = False
    files: tuple[tuple[str, int], ...] = ()
    hosts: Mapping[str, int] = field(default_factory=dict)
    locals: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    pods: Mapping[str, frozenset[str]] = field(default_factory=dict)
    sections: Mapping[str, Sequence[Section]] = field(default_factory=dict)
    several: bool = False

    def at_pid(self, pid: int, host: str | None = None) -> Seat | None:
        """The rank of a process; None where none or several fit."""
        return _only(one for one in self.seats if one.pid == pid and _there(one, host))

    def at_gpu(self, bus: str, host: str | None = None) -> Seat | None:
        """The rank on a GPU by its PCI bus id (`c1:00`, `0000:c1:00.0`, `c1000`); None where none or several fit."""
        wanted = bus_key(bus)
        return _only(one for one in self.seats if one.gpu_bus and bus_key(one.gpu_bus) == wanted and _there(one, host))

    def at_local(self, local_rank: int, host: str | None = None) -> Seat | None:
        """The rank with a local rank on a host; None where none or several fit."""
        return _only(one for one in self.seats if one.local_rank == local_rank and _there(one, host))

    def local_in(self, file: str, local_rank: int) -> int | None:
        """The rank with a local rank that an artifact speaks of, where it tells which node it is of."""
        return self.locals.get(file, {}).get(local_rank)

    def of(self, rank: int) -> Seat | None:
        """The last known seat of a rank."""
        return next((one for one in reversed(self.seats) if one.rank == rank), None)

    def on(self, host: str) -> tuple[int, ...]:
        """The ranks of a host, or of the pods that have its name or address."""
        names = {host, *(pod for pod, others in self.pods.items() if host in others)}
        names |= {other for other in self.pods.get(host, ()) if other.replace(".", "").isdigit()}
        found = {one.rank for one in self.seats if one.host is not None and any(same_host(one.host, name) for name in names)}
        return tuple(sorted(found | {self.hosts[name] for name in names if name in self.hosts}))

    @property
    def silent(self) -> tuple[int, ...]:
        """The ranks that left nothing: of the world where its size is known, else the gaps between those seen."""
        size = self.world_size if self.world_size is not None else max(self.seen, default=-1) + 1
        return tuple(rank for rank in range(size) if rank not in self.seen) if self.seen and size <= MOST else ()

    def missing(self) -> tuple[str, ...]:
        """The ranks that left nothing, in one readable line; nothing where all did."""
        if not self.silent:
            return ()
        known = (
            f"of {self.world_size} ({self.world_size_from})" if self.world_size else f"between those seen (0-{max(self.seen)})"
        )
        word = "rank" if len(self.silent) == 1 else "ranks"
        return (f"no line or file of {word} {ranges(self.silent)} {known}",)


MOST = 1 << 20
"""A world size beyond this is no world size."""


def _there(seat: Seat, host: str | None) -> bool:
    return host is None or seat.host is None or same_host(seat.host, host)


def _only(found: Iterable[Seat]) -> Seat | None:
    """The seat, where all found are of one rank."""
    seats = list(found)
    return seats[-1] if seats and all(one.rank == seats[0].rank for one in seats) else None


def same_host(one: str, other: str) -> bool:
    """Whether two names are of one host: a short name and its long form are."""
    one, other = one.lower(), other.lower()
    if one == other:
        return True
    short, long = sorted((one, other), key=len)
    return long.startswith(short + ".") and not short.replace(".", "").isdigit()


def ranges(ranks: Iterable[int]) -> str:
    """`0, 3-7, 9`: readable also for thousands of ranks."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def bus_key(bus: str) -> str:
    """Bus and device of a PCI address in any notation: `0000:c1:00.0`, `c1:00`, NCCL's `c1000` -> `c100`."""
    plain = bus.lower().split(".")[0]
    parts = plain.split(":")
    if len(parts) == 1:
        return plain.zfill(5)[-5:-1].lstrip("0") if len(plain) > 4 else plain.lstrip("0")
    return (parts[-2] + parts[-1]).lstrip("0")


_COMM = re.compile(
    r"\bcomm (?P<comm>0x[0-9a-f]+) rank (?P<rank>\d+) n(?:R|r)anks (?P<size>\d+)(?: cudaDev (?P<dev>\d+))?(?: nvmlDev \d+)?(?: busId (?P<bus>[0-9a-f]+))?(?: commId (?P<id>0x[0-9a-f]+))?"
)
_SIZES: tuple[tuple[str, str, int], ...] = (
    (r"\bglobal_world_sizes=\[(\d+)", "elastic's rendezvous", 4),
    (r"\b[wW]orld[ _]?[sS]ize(?:'?\"?) ?[=:]+ ?(\d+)", "world_size in the log", 3),
    (r"\bWORLD_SIZE[=:'\" ]+(\d+)", "WORLD_SIZE in the log", 3),
    (r"\bglobal_rank=\d+\((\d+)\)", "submitit", 4),
    (
        r"\btotal world size[ :]+(\d+)|All distributed processes registered\. Starting with (\d+) processes",
        "the trainer's greeting",
        4,
    ),
    (r"\bSLURM_NTASKS[=:'\" ]+(\d+)", "SLURM_NTASKS", 2),
)
_SIZE = tuple((re.compile(pattern), known, weight) for pattern, known, weight in _SIZES)
_SIZE_ANCHOR = re.compile(r"(?i)world|SLURM_NTASKS|global_rank=|All distributed processes")
_PLACED = re.compile(
    r"\b(?:global_?)?rank ?[=:] ?(?P<rank>\d{1,6})(?:\(\d+\))?\b.{0,40}?\blocal_?rank ?[=:] ?(?P<local>\d{1,4})\b"
    r"|\blocal_?rank ?[=:] ?(?P<local2>\d{1,4})\b.{0,60}?\b(?:global_?)rank ?[=:] ?(?P<rank2>\d{1,6})\b",
    re.IGNORECASE,
)
_RANK_ENV = re.compile(r"\bRANK[=:'\" ]+(?P<rank>\d{1,6})\b.*?\bLOCAL_RANK[=:'\" ]+(?P<local>\d{1,4})\b")
_TABLE = re.compile(r"^\s*(?P<key>host|rank|exitcode|time)\s*: (?P<value>.*)$")
_TABLE_RANK = re.compile(r"(\d+) \(local_rank: (\d+)\)")
_TABLE_PID = re.compile(r"\(pid: (\d+)\)")
_GLOBAL_RANKS = re.compile(r"\bglobal_ranks=\[([\d, ]*)\]")
_LOCAL_RANKS = re.compile(r"\blocal_ranks=\[([\d, ]*)\]")
_FAILED = re.compile(r"failed \(exitcode: -?\d+\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)")
_ATTEMPT = re.compile(r"(?:^|/)attempt_\d+/")
_READY = re.compile(r'"rank": (?P<rank>\d{1,6})\b.*"pid": (?P<pid>\d{1,10})\b')


@dataclass(slots=True)
class _Tied:
    """What was gathered while the lines went by."""

    comms: dict[tuple[str | None, int], list[tuple[int, int, str | None, int | None, str]]]
    seats: dict[tuple[int, str | None, int | None], Seat]
    sizes: dict[tuple[int, int, str], int]
    locals: dict[str, dict[int, int]]
    pids: dict[tuple[str, int], tuple[int, str | None]]


def identify(artifacts: Sequence[Artifact], lines: Sequence[Line], events: Sequence[Event] = ()) -> Who:
    """Tie together what names, tags, NCCL init lines, launchers' greetings and elastic's tables say."""
    tied = _Tied(defaultdict(list), {}, defaultdict(int), defaultdict(dict), {})
    table: dict[str, str] = {}
    local_ranks: tuple[str, list[int]] | None = None
    for line in lines:
        text = line.text
        if "rank" in text or "RANK" in text:
            _comm(line, tied)
            _placed(line, tied)
            if found := _LOCAL_RANKS.search(text):
                local_ranks = (line.artifact.name, _numbers(found[1]))
            if (found := _GLOBAL_RANKS.search(text)) and local_ranks and local_ranks[0] == line.artifact.name:
                tied.locals[line.artifact.name] |= dict(zip(local_ranks[1], _numbers(found[1]), strict=False))
        if _SIZE_ANCHOR.search(text):
            _sizes(text, tied)
        if (row := _TABLE.match(text)) is not None:
            _table(row["key"], row["value"].strip(), table, tied)
    _global_comms(tied)
    ranks = [*(one.rank for one in artifacts), *(one.rank for one in lines), *(one.rank for one in events)]
    seen = {rank for rank in ranks if rank is not None}
    told = places(lines)
    shown, at_hosts, several = bindings.shown_by(lines)
    for place in told.at:
        _sit(tied, Seat(rank=place.rank, host=place.host, pid=place.pid))
    size = _world(tied, seen)[0]
    pods = {one.pod: one.rank for found in told.sections.values() for one in found if one.rank is not None}
    names = set(told.pods) | set(at_hosts) | {line.host for line in lines if line.host}
    hosts = bindings.pods(names, at_hosts, size, seen) | pods
    files = bindings.bound(artifacts, shown, told, several, size, seen) | _files(tied, lines)
    for pod, rank in hosts.items():
        _sit(tied, Seat(rank=rank, host=pod))
    seen |= set(files.values())
    who = _joined(tied, artifacts, lines, seen, told)
    who = replace(who, files=tuple(files.items()), hosts=hosts, locals=_locals(tied, told, shown))
    return replace(who, seats=_with_pids(who, tied))


def _locals(tied: _Tied, told: Places, shown: Mapping[str, set[int]]) -> dict[str, dict[int, int]]:
    """What elastic tells, else the node's number, else the ranks that are seen to follow each other."""
    return dict(blocks(shown)) | dict(told.locals()) | tied.locals


def seated(who: Who, lines: Sequence[Line]) -> list[Line]:
    """The lines, with the rank of their process where only its id or its local rank was told, and the host of their rank."""
    hosts: dict[int, set[str]] = {}
    seat: Seat | None
    for seat in who.seats:
        if seat.host is not None and seat.host != "localhost":
            hosts.setdefault(seat.rank, set()).add(seat.host)
    by_pid: dict[tuple[int, str | None], int | None] = {}
    by_local: dict[tuple[int, str | None], int | None] = {}
    homes = _homes(who, lines)
    of_file = {name: rank for name, rank in who.files}
    pods = {name: rank for name, rank in who.hosts.items()}
    found = []
    for line in lines:
        name = line.artifact.name
        rank = line.rank if line.rank is not None else of_file.get(name)
        if rank is None and name in who.sections:
            rank = _section(who.sections[name], line.number)
        if rank is None and line.host in pods and not line.local_rank:
            rank = pods[line.host]
        if rank is None and line.pid is not None:
            if (line.pid, line.host) not in by_pid:
                seat = who.at_pid(line.pid, line.host)
                by_pid[line.pid, line.host] = seat.rank if seat else None
            rank = by_pid[line.pid, line.host]
        if rank is None and line.local_rank is not None:
            rank = who.local_in(name, line.local_rank)
        if rank is None and line.local_rank is not None:
            if (line.local_rank, line.host) not in by_local:
                seat = who.at_local(line.local_rank, line.host)
                by_local[line.local_rank, line.host] = seat.rank if seat else line.local_rank if who.one_host else None
            rank = by_local[line.local_rank, line.host]
        host = line.host or homes.get(line.artifact.name)
        if host is None and rank is not None and len(hosts.get(rank, ())) == 1:
            host = next(iter(hosts[rank]))
        found.append(line if rank == line.rank and host == line.host else replace(line, rank=rank, host=host))
    return found


def _section(sections: Sequence[Section], number: int) -> int | None:
    """The rank of the pod that this line describes."""
    return next((one.rank for one in reversed(sections) if one.first <= number), None)


def _homes(who: Who, lines: Sequence[Line]) -> dict[str, str]:
    """The host of each artifact whose name holds the name of one host of the job: `dmesg-n17.txt`, `n17/rank3.log`."""
    hosts = {one.host for one in who.seats if one.host} | {one.host for one in lines if one.host} | set(who.pods)
    shorts = {host.split(".")[0]: host for host in hosts if not host.replace(".", "").isdigit() and host != "localhost"}
    if not shorts:
        return {}
    choice = "|".join(re.escape(one) for one in sorted(shorts, key=len, reverse=True) if len(one) > 2)
    pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{choice})(?![A-Za-z0-9])") if choice else None
    homes = {}
    for name in {line.artifact.name for line in lines}:
        found = set(pattern.findall(name)) if pattern else set()
        if len(found) == 1:
            homes[name] = shorts[found.pop()]
    return homes


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one.strip().isdigit()]


def _comm(line: Line, tied: _Tied) -> None:
    """A communicator's init line: a rank in it, its size, the process and its GPU."""
    if (match := _COMM.search(line.text)) and line.pid is not None:
        device = int(match["dev"]) if match["dev"] else None
        tied.comms[line.host, line.pid].append(
            (int(match["rank"]), int(match["size"]), match["bus"], device, match["id"] or match["comm"])
        )
        if line.rank is not None:
            _sit(tied, Seat(rank=line.rank, host=line.host, pid=line.pid, gpu_bus=match["bus"]))


def _placed(line: Line, tied: _Tied) -> None:
    if match := _RANK_ENV.search(line.text) or _PLACED.search(line.text):
        part = match.groupdict()
        rank = int(part["rank"] or part["rank2"])
        _sit(tied, Seat(rank=rank, host=line.host, local_rank=int(part["local"] or part["local2"]), pid=line.pid))
    elif match := _FAILED.search(line.text):
        tied.pids[line.artifact.name, int(match["pid"])] = (int(match["local"]), line.host)
    elif match := _READY.search(line.text):
        _sit(tied, Seat(rank=int(match["rank"]), host=line.host, pid=int(match["pid"])))


def _sizes(text: str, tied: _Tied) -> None:
    for pattern, known, weight in _SIZE:
        if match := pattern.search(text):
            size = int(next(one for one in match.groups() if one))
            if 0 < size <= MOST:
                tied.sizes[weight, size, known] += 1


def _table(key: str, value: str, table: dict[str, str], tied: _Tied) -> None:
    """A row of elastic's table of failures; a seat once its rank and its pid are both there."""
    if key in ("time", "host"):
        table.pop("rank", None)
    table[key] = value
    rank, pid = _TABLE_RANK.match(table.get("rank", "")), _TABLE_PID.search(table.get("exitcode", ""))
    if key == "exitcode" and rank and pid:
        _sit(tied, Seat(rank=int(rank[1]), host=table.get("host") or None, local_rank=int(rank[2]), pid=int(pid[1])))
        table.clear()


def _sit(tied: _Tied, seat: Seat) -> None:
    """Add a seat, or what it says newly of a process that is known."""
    key = (seat.rank, seat.host, seat.pid)
    for other in ((seat.rank, None, seat.pid), (seat.rank, seat.host, None), key):
        if (known := tied.seats.pop(other, None)) is not None:
            seat = Seat(
                rank=seat.rank,
                host=seat.host or known.host,
                local_rank=known.local_rank if seat.local_rank is None else seat.local_rank,
                pid=known.pid if seat.pid is None else seat.pid,
                gpu_bus=seat.gpu_bus or known.gpu_bus,
            )
    tied.seats[seat.rank, seat.host, seat.pid] = seat


def _global_comms(tied: _Tied) -> None:
    """Ranks in the communicator of the whole job are ranks of the job; those in a part of it are not."""
    size = max((one[1] for found in tied.comms.values() for one in found), default=0)
    told = max(tied.sizes, default=None)
    # two processes with the same rank in such a communicator, or one with two ranks: several parts of the job that are equally large
    several = any(len({rank for rank, of, *_ in found if of == size}) > 1 for found in tied.comms.values())
    # a restarted job has new processes on the same devices
    slots = {(host, device) for (host, _), found in tied.comms.items() for _, _, _, device, _ in found if device is not None}
    if not size or several or len(slots) > size or (told and told[1] > size):
        return
    tied.sizes[2, size, "the largest communicator in NCCL's log"] += 1
    for process, found in tied.comms.items():
        for rank, of, bus, _device, _comm_id in found:
            if of == size:
                _sit(tied, Seat(rank=rank, host=process[0], pid=process[1], gpu_bus=bus))
                break


def _files(tied: _Tied, lines: Sequence[Line]) -> dict[str, int]:
    """Files of one process each, with the one rank that their lines name."""
    ranks: dict[str, set[int]] = defaultdict(set)
    local: dict[str, int] = {}
    for line in lines:
        if line.artifact.local_rank is not None and line.rank is not None:
            ranks[line.artifact.name].add(line.rank)
            local[line.artifact.name] = line.artifact.local_rank
    files = {name: found.pop() for name, found in ranks.items() if len(found) == 1}
    for name, rank in files.items():
        _sit(tied, Seat(rank=rank, local_rank=local[name]))
    return files


def _joined(tied: _Tied, artifacts: Sequence[Artifact], lines: Sequence[Line], seen: set[int], told: Places) -> Who:
    for name, ranks in tied.locals.items():
        host = next((line.host for line in lines if line.artifact.name == name and line.host), None)
        for own, rank in ranks.items():
            _sit(tied, Seat(rank=rank, host=host, local_rank=own))
    size, known = _world(tied, seen)
    local = {line.local_rank for line in lines if line.local_rank is not None}
    local |= {one.local_rank for one in artifacts if one.local_rank is not None}
    hosts = {seat.host for seat in tied.seats.values() if seat.host} | {
        line.host for line in lines if line.host and line.local_rank is not None
    }
    placed = [seat for seat in tied.seats.values() if seat.local_rank is not None]
    # torchrun's folders of two hosts hold the same local ranks
    runs = {_ATTEMPT.split(one.name)[0] for one in artifacts if one.local_rank is not None}
    one_host = (
        bool(local)
        and not told.several
        and len(runs) <= 1
        and len(hosts) <= 1
        and all(seat.local_rank == seat.rank for seat in placed)
        and max(seen, default=0) <= max(local)
        and (size is None or size <= max(local) + 1)
    )
    if one_host:
        seen = seen | {one for one in local if one is not None}
    seen = seen | {seat.rank for seat in tied.seats.values() if seat.pid is not None}
    seats = tuple(tied.seats[key] for key in sorted(tied.seats, key=lambda key: (key[0], key[2] or 0)))
    return Who(
        world_size=size,
        world_size_from=known,
        seats=seats,
        seen=frozenset(seen),
        one_host=one_host,
        pods={pod: frozenset(names) for pod, names in told.pods.items()},
        sections=told.sections,
        several=told.several,
    )


def _world(tied: _Tied, seen: set[int]) -> tuple[int | None, str]:
    """The world size that the best source tells most often, unless a rank beyond it was seen."""
    for (_, size, known), _ in sorted(tied.sizes.items(), key=lambda entry: (-entry[0][0], -entry[1], -entry[0][1])):
        if size > max(seen, default=-1):
            return size, known
    return None, ""


def _with_pids(who: Who, tied: _Tied) -> tuple[Seat, ...]:
    """Processes of which elastic told the local rank only."""
    more = []
    for (name, pid), (local, host) in tied.pids.items():
        if any(seat.pid == pid for seat in who.seats):
            continue
        seat = who.at_local(local, host)
        rank = who.local_in(name, local)
        rank = rank if rank is not None else seat.rank if seat else local if who.one_host else None
        if rank is not None:
            more.append(Seat(rank=rank, host=host, local_rank=local, pid=pid))
    return (*who.seats, *more)
