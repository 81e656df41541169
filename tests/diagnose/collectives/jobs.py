"""Jobs of many ranks on paper: who calls what, what of it can complete, and the dumps that their flight recorders would leave.

A rank makes its calls in order. Its device runs them in that order, one at a time; its processor runs ahead until a call that it
waits for. A call completes when all members of its group, or both ends of a pair, are at it with the same call.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

T0_NS = 1_780_000_000_000_000_000
MS = 1_000_000
UNEVEN = ("all_to_all", "gather", "scatter")


@dataclass(frozen=True)
class Group:
    name: str
    desc: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """`waits`: the processor waits for it. `late_ms`: so much later than otherwise the rank comes to it."""

    group: Group
    op: str
    elements: int
    dtype: str = "Float"
    peer: int | None = None
    waits: bool = False
    line: int = 10
    ins: tuple[int, ...] | None = None
    outs: tuple[int, ...] | None = None
    late_ms: float = 0.0
    never: bool = False

    def meets(self, other: Call) -> bool:
        sizes = self.op in UNEVEN or self.elements == other.elements
        return (self.op, self.dtype) == (other.op, other.dtype) and sizes


@dataclass
class Record:
    call: Call
    seq: int
    p2p: int
    op: int
    created_ns: int
    begin_ns: int | None = None
    end_ns: int | None = None


@dataclass
class Job:
    world: int
    groups: list[Group] = field(default_factory=list)
    programs: dict[int, list[Call]] = field(default_factory=dict)

    def group(self, desc: str, ranks: Iterable[int]) -> Group:
        made = Group(str(len(self.groups)), desc, tuple(ranks))
        self.groups.append(made)
        return made

    def each(self, ranks: Iterable[int], make: Callable[[int], Call]) -> None:
        for rank in ranks:
            self.programs.setdefault(rank, []).append(make(rank))

    def mine(self, desc: str, rank: int) -> Group:
        return next(one for one in self.groups if one.desc == desc and rank in one.ranks)


def ddp(world: int, steps: int, buckets: Sequence[int] = (4096, 1024, 512)) -> Job:
    job = Job(world)
    group = job.group("default_pg", range(world))
    for _ in range(steps):
        for size in buckets:
            job.each(range(world), lambda _, size=size: Call(group, "all_reduce", size, line=20))
        job.each(range(world), lambda _: Call(group, "all_reduce", 1, waits=True, line=30))
    return job


def fsdp(world: int, steps: int, layers: int = 3) -> Job:
    job = Job(world)
    group = job.group("default_pg", range(world))
    for _ in range(steps):
        for layer in range(layers):
            job.each(range(world), lambda _, layer=layer: Call(group, "_all_gather_base", 100 + layer, "BFloat16", line=40))
        for layer in reversed(range(layers)):
            job.each(range(world), lambda _, layer=layer: Call(group, "_reduce_scatter_base", (100 + layer) * world, line=50))
        job.each(range(world), lambda _: Call(group, "all_reduce", 2, waits=True, line=60))
    return job


def moe(world: int, steps: int) -> Job:
    """Uneven by right: every rank brings another number of elements."""
    job = Job(world)
    group = job.group("default_pg", range(world))
    for step in range(steps):
        for _ in range(2):
            job.each(range(world), lambda rank, step=step: Call(group, "all_to_all", 100 + (rank * 7 + step) % 5, line=45))
        job.each(range(world), lambda rank: Call(group, "gather", 8, line=46, outs=(8,) * world if rank == 0 else ()))
        job.each(range(world), lambda _: Call(group, "all_reduce", 64, line=20))
        job.each(range(world), lambda _: Call(group, "all_reduce", 1, waits=True, line=30))
    return job


def hsdp(shards: int, replicas: int, steps: int) -> Job:
    world = shards * replicas
    job = Job(world)
    everyone = job.group("default_pg", range(world))
    for replica in range(replicas):
        job.group("shard", range(replica * shards, (replica + 1) * shards))
    for place in range(shards):
        job.group("replicate", range(place, world, shards))
    for _ in range(steps):
        for layer in range(2):
            job.each(
                range(world), lambda rank, layer=layer: Call(job.mine("shard", rank), "_all_gather_base", 64 + layer, line=40)
            )
        for layer in reversed(range(2)):
            job.each(
                range(world),
                lambda rank, layer=layer: Call(job.mine("shard", rank), "_reduce_scatter_base", (64 + layer) * shards, line=50),
            )
            job.each(
                range(world), lambda rank, layer=layer: Call(job.mine("replicate", rank), "all_reduce", 64 + layer, line=55)
            )
        job.each(range(world), lambda _: Call(everyone, "all_reduce", 1, waits=True, line=30))
    return job


def mesh(stages: int, replicas: int, width: int, steps: int, micro: int = 2) -> Job:
    """Pipeline x data x tensor parallel, the last varying fastest."""
    world = stages * replicas * width
    job = Job(world)
    everyone = job.group("default_pg", range(world))
    inner = replicas * width
    for place in range(inner):
        job.group("pp", range(place, world, inner))
    for first in range(0, world, width):
        job.group("tp", range(first, first + width))
    for stage in range(stages):
        for place in range(width):
            job.group("dp", range(stage * inner + place, (stage + 1) * inner, width))
    for _ in range(steps):
        for rank in range(world):
            program, stage = job.programs.setdefault(rank, []), rank // inner
            tp, dp, pp = (job.mine(desc, rank) for desc in ("tp", "dp", "pp"))
            for backward in (False, True):
                before, after = (rank + inner, rank - inner) if backward else (rank - inner, rank + inner)
                for _ in range(micro):
                    if 0 <= before < world:
                        program.append(Call(pp, "recv", 256, "BFloat16", peer=before, line=70 + backward))
                    if width > 1:
                        program.append(Call(tp, "_all_gather_base", 32, "BFloat16", line=80 + backward))
                        program.append(Call(tp, "_reduce_scatter_base", 32 * width, "BFloat16", line=90 + backward))
                    if 0 <= after < world:
                        program.append(Call(pp, "send", 256, "BFloat16", peer=after, line=75 + backward))
            if replicas > 1:
                program.append(Call(dp, "_reduce_scatter_base", 512 * replicas + stage, line=50))
                program.append(Call(dp, "_all_gather_base", 512 + stage, line=52))
            program.append(Call(everyone, "all_reduce", 1, waits=True, line=30))
    return job


def run(job: Job, *, lenient: bool = False, run_ahead: bool = True, own_ms: float = 1.0) -> dict[int, list[Record]]:
    """What each rank has called when nothing moves any more. `lenient`: calls of other sizes complete all the same."""
    records: dict[int, list[Record]] = {rank: [] for rank in range(job.world)}
    counts: dict[tuple[int, str], list[int]] = {}
    clock = {rank: T0_NS + rank * MS // 10 for rank in records}
    done = dict.fromkeys(records, 0)
    free = dict.fromkeys(records, 0)

    def enqueue(rank: int) -> None:
        program, mine = job.programs.get(rank, []), records[rank]
        while len(mine) < len(program):
            if mine and (mine[-1].call.waits or not run_ahead) and mine[-1].end_ns is None:
                return
            if mine and mine[-1].end_ns is not None:
                clock[rank] = max(clock[rank], mine[-1].end_ns) if mine[-1].call.waits or not run_ahead else clock[rank]
            call = program[len(mine)]
            count = counts.setdefault((rank, call.group.name), [0, 0, 0])
            count[call.peer is not None] += 1
            count[2] += 1
            clock[rank] += int((0.05 + call.late_ms + (own_ms if mine and mine[-1].call.waits else 0)) * MS)
            mine.append(Record(call, count[0], count[1], count[2], clock[rank]))

    def head(rank: int) -> Record | None:
        return records[rank][done[rank]] if done[rank] < len(records[rank]) else None

    def partners(rank: int, one: Record) -> list[tuple[int, Record]] | None:
        call = one.call
        ranks = (rank, call.peer) if call.peer is not None else call.group.ranks
        found = []
        for other in ranks:
            there = head(other)
            if there is None or there.call.never or there.call.group != call.group:
                return None
            if call.peer is not None:
                if other != rank and not (there.call.peer == rank and {there.call.op, call.op} == {"send", "recv"}):
                    return None
                if there.call.elements != call.elements:
                    return None
            elif there.call.peer is not None or there.seq != one.seq or not (lenient or call.meets(there.call)):
                return None
            found.append((other, there))
        return found

    moved = True
    while moved:
        moved = False
        for rank in records:
            enqueue(rank)
        for rank in records:
            one = head(rank)
            together = partners(rank, one) if one is not None else None
            if together:
                begins = {other: max(there.created_ns, free[other]) for other, there in together}
                for other, there in together:
                    there.begin_ns = begins[other]
                    there.end_ns = free[other] = max(begins.values()) + MS // 5
                    done[other] += 1
                moved = True
    for rank in records:
        one = head(rank)
        if one is not None:
            one.begin_ns = max(one.created_ns, free[rank])
    return records


@dataclass(frozen=True, kw_only=True)
class Look:
    """How the dumps look."""

    version: str = "2.10"
    backend: str = "nccl"
    timed: bool = True
    ring: int = 2000
    history: int = 0
    prefix: str = "nccl_trace_rank_"
    frames: bool = True
    as_json: bool = False
    only_active: bool = False
    missing: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()
    skew_ms: Mapping[int, float] = field(default_factory=dict)
    views: Mapping[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)


def write(folder: Path, job: Job, records: Mapping[int, Sequence[Record]], look: Look) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ends = [one.end_ns or one.created_ns for mine in records.values() for one in mine]
    dumped = max(ends, default=T0_NS) + (
        600_000 * MS if any(one.end_ns is None for mine in records.values() for one in mine) else MS
    )
    for rank, mine in records.items():
        if rank in look.missing:
            continue
        whole = _dump(job, rank, mine, look, dumped)
        data = json.dumps(whole).encode() if look.as_json else pickle.dumps(whole, 2)
        path = folder / f"{look.prefix}{rank}{'.json' if look.as_json else ''}"
        path.write_bytes(data[: len(data) * 2 // 5] if rank in look.cut else data)


def _dump(job: Job, rank: int, mine: Sequence[Record], look: Look, dumped: int) -> dict[str, Any]:
    minor = int(look.version.split(".")[1])
    gloo = look.backend == "gloo"
    local = {one.name: number for number, one in enumerate(one for one in job.groups if rank in one.ranks)}
    skew = int(look.skew_ms.get(rank, 0) * MS)
    status = {number: [look.history, -1, look.history] for number in local.values()}
    rows = []
    for number, one in enumerate(mine):
        call, ended = one.call, one.end_ns is not None
        begun = one.begin_ns is not None
        if call.peer is None:
            told = status[local[call.group.name]]
            told[0] = one.seq + look.history
            told[2] = one.seq + look.history if ended else told[2]
        elif gloo:
            continue  # gloo does not record them
        rows.append(_entry(one, number, rank, look, local[call.group.name], ended, begun, skew, dumped, minor, gloo))
    if look.only_active:
        rows = [row for row in rows if not row["retired"]]
    config = {
        one.name: {"name": one.name, "desc": one.desc, "ranks": str(list(look.views.get((rank, one.name), one.ranks)))}
        for one in job.groups
        if rank in one.ranks and look.views.get((rank, one.name), (0,))
    }
    names = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    return {
        "version": look.version,
        "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}} if gloo else config,
        "pg_status": {str(number): dict(zip(names, told, strict=True)) for number, told in status.items()},
        "entries": rows[-look.ring :],
    }


def _entry(
    one: Record,
    number: int,
    rank: int,
    look: Look,
    pg_id: int,
    ended: bool,
    begun: bool,
    skew: int,
    dumped: int,
    minor: int,
    gloo: bool,
) -> dict[str, Any]:
    call = one.call
    name = call.op
    if call.peer is not None:
        me, peer = call.group.ranks.index(rank), call.group.ranks.index(call.peer)
        name = f"send {me}->{peer}" if call.op == "send" else f"recv {me}<-{peer}"
    timed = look.timed and not gloo
    row: dict[str, Any] = {
        "record_id": number + look.history,
        "pg_id": pg_id,
        "process_group": (call.group.name, call.group.desc),
        "collective_seq_id": one.seq + look.history,
        "p2p_seq_id": one.p2p and one.p2p + look.history,
        "op_id": one.op + look.history,
        "profiling_name": f"{look.backend}:{name}",
        "time_created_ns": one.created_ns + skew,
        "input_sizes": [[call.elements]] if call.ins is None else [[size] for size in call.ins],
        "output_sizes": [[call.elements]] if call.outs is None else [[size] for size in call.outs],
        "state": "completed" if ended and not gloo else "started" if begun and timed else "scheduled",
        "time_discovered_started_ns": (one.begin_ns if ended else dumped) + skew if timed and begun else None,
        "time_discovered_completed_ns": one.end_ns + skew if one.end_ns is not None and not gloo else None,
        "retired": ended,
        "timeout_ms": 600_000,
        "is_p2p": call.peer is not None,
    }
    if minor >= 3:
        row |= {"input_dtypes": [call.dtype], "output_dtypes": [call.dtype]}
    if timed and one.begin_ns is not None and one.end_ns is not None:
        row["duration_ms"] = (one.end_ns - one.begin_ns) / MS
    if look.frames:
        torch = {
            "name": call.op,
            "filename": "/opt/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py",
            "line": 1,
        }
        row["frames"] = [torch, {"name": "step", "filename": "/srv/job/loop.py", "line": call.line}]
    if minor < 2:
        del row["retired"]
    return row


def edited(job: Job, rank: int, change: Callable[[list[Call]], list[Call]]) -> Job:
    return Job(job.world, job.groups, {**job.programs, rank: change(list(job.programs[rank]))})


def without(place: int) -> Callable[[list[Call]], list[Call]]:
    return lambda calls: calls[:place] + calls[place + 1 :]


def frozen(place: int) -> Callable[[list[Call]], list[Call]]:
    return lambda calls: calls[:place]


def exchanged(place: int) -> Callable[[list[Call]], list[Call]]:
    return lambda calls: [*calls[:place], calls[place + 1], calls[place], *calls[place + 2 :]]


def changed(place: int, **to: Any) -> Callable[[list[Call]], list[Call]]:
    return lambda calls: [*calls[:place], replace(calls[place], **to), *calls[place + 1 :]]
