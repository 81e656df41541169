"""Who waited in which collective until its time-out: the words of ProcessGroupNCCL and gloo of every rank, per process group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from dtprobe.diagnose.case import Case, Event, Line

DEFAULT_GROUP = "default"
FRAME = "#"
FROZEN = 2.0
FROZEN_MS = 5000
"""A watchdog that is this much later than its time-out was not run: on healthy and on loaded hosts it is late by 10 to 100 ms."""
_TORCH = ("torch/distributed/", "site-packages/torch/", "dist-packages/torch/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeout:
    """A rank gave up on a collective. `group` is how the ranks name the process group; `stack` the printed frames, innermost first.

    `inner` is the rank within the group, where the line names it beside the global one. `began_ns` is the time of the line less how long the collective ran.
    `limit_ms` is the time-out, `ran_ms` what had passed when the watchdog saw it.
    """

    rank: int
    line: Line
    group: str = DEFAULT_GROUP
    seq: int | None = None
    op: str | None = None
    numel_in: int | None = None
    numel_out: int | None = None
    began_ns: int | None = None
    stack: tuple[tuple[str, Line], ...] = ()
    inner: int | None = None
    limit_ms: int | None = None
    ran_ms: int | None = None

    @property
    def frozen(self) -> bool:
        """The watchdog, which looks every second or more often, saw the time-out far too late: its process did not run meanwhile."""
        if not self.limit_ms or self.ran_ms is None:
            return False
        return self.ran_ms >= FROZEN * self.limit_ms and self.ran_ms - self.limit_ms >= FROZEN_MS

    @property
    def what(self) -> str:
        """The operation in words."""
        name = self.op or "a collective"
        parts = [f"{name} #{self.seq}" if self.seq is not None else name]
        if self.numel_in is not None:
            parts.append(f"of {self.numel_in} elements")
        return " ".join(parts)

    @property
    def place(self) -> str | None:
        """The innermost printed frame outside torch.distributed: which line of the program waits."""
        return self._own_frame[0] if self._own_frame else None

    @property
    def place_line(self) -> Line | None:
        """Where that frame is printed."""
        return self._own_frame[1] if self._own_frame else None

    @property
    def _own_frame(self) -> tuple[str, Line] | None:
        whole = (frame for frame in self.stack if frame[0].rpartition(":")[2].isdigit())
        return next((frame for frame in whole if not any(one in frame[0] for one in _TORCH)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How far a rank got in a group: the numbers of the last collective it enqueued and the last one that completed."""

    rank: int
    group: str
    enqueued: int
    completed: int
    line: Line
    inner: int | None = None

    @property
    def idle(self) -> bool:
        """Everything it enqueued is done: it is not waiting in this group."""
        return self.enqueued == self.completed


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """All time-outs and states of a case. `timeouts` are the first a rank and group, in the order read; `every` are all of them."""

    timeouts: tuple[Timeout, ...] = ()
    every: tuple[Timeout, ...] = ()
    statuses: tuple[Status, ...] = ()
    gloo: tuple[Event, ...] = ()
    first_line: Line | None = None
    by_group: dict[str, tuple[Timeout, ...]] = field(default_factory=dict)

    def waiting(self) -> frozenset[int]:
        """The ranks that timed out."""
        return frozenset(one.rank for one in self.timeouts) | frozenset(one.rank for one in self.gloo if one.rank is not None)

    def status(self, rank: int, group: str) -> Status | None:
        """How far this rank got in the group; in any group where this one is not known."""
        mine = [one for one in self.statuses if one.rank == rank]
        return next((one for one in mine if one.group == group), mine[0] if len({one.group for one in mine}) == 1 else None)


@lru_cache(maxsize=2)
def waits(case: Case) -> Waits:
    """The time-outs of every rank."""
    statuses = list(_statuses(case))
    groups = {(one.rank, seq): one.group for one, seq in statuses if seq is not None}
    stacks = _stacks(case)
    found: dict[tuple[int, str, int | None], Timeout] = {}
    for event in case.of("nccl-timeout"):
        one = _timeout(event)
        if one is None:
            continue
        group = groups.get((one.rank, one.seq), DEFAULT_GROUP) if one.seq is not None else DEFAULT_GROUP
        key = (one.rank, group, one.seq)
        if key not in found:
            found[key] = replace(one, group=group, stack=stacks.get((one.rank, one.line.artifact.name), ()))
    for one in _short(statuses):
        if (one.rank, one.group, one.seq) not in found:
            found[one.rank, one.group, one.seq] = one
    first: dict[tuple[int, str], Timeout] = {}
    for one in found.values():
        first.setdefault((one.rank, one.group), one)
    timeouts = tuple(first.values())
    lines = [one.line for one in timeouts]
    gloo = tuple(case.of("gloo-timeout", "gloo-wait-timeout"))
    by_group = {
        name: tuple(one for one in timeouts if one.group == name) for name in dict.fromkeys(one.group for one in timeouts)
    }
    return Waits(
        timeouts=timeouts,
        every=tuple(found.values()),
        statuses=_latest(statuses),
        gloo=gloo,
        first_line=lines[0] if lines else (gloo[0].line if gloo else None),
        by_group=by_group,
    )


def _rank(event: Event) -> int | None:
    """The global rank where a tag says it, else the rank within the group, which is the same in the default group."""
    if event.line.rank is not None:
        return event.line.rank
    inner = event.fields.get("group_rank")
    return int(inner) if inner is not None else None


def _inner(event: Event) -> int | None:
    """The rank within the group, where it is told beside the global one."""
    inner = event.fields.get("group_rank")
    return int(inner) if inner is not None and event.line.rank is not None else None


def _group(event: Event) -> str:
    """How the ranks name the group. The first one that a job makes is the default group: torch 2.2-2.4 give its number alone."""
    name = event.fields.get("guid") or event.fields.get("name") or event.fields["pg"]
    return DEFAULT_GROUP if "default_pg" in name or name.strip() == "0" else name


def _number(text: str | None) -> int | None:
    return int(text) if text else None


def _timeout(event: Event) -> Timeout | None:
    rank = _rank(event)
    if rank is None:
        return None
    fields, ran_ms = event.fields, int(event.fields["ran_ms"])
    shape = fields.get("shape")
    numel = _number(fields.get("numel_in"))
    if numel is None and shape:
        numel = 1
        for size in shape.split(","):
            numel *= int(size)
    return Timeout(
        rank=rank,
        line=event.line,
        seq=_number(fields.get("seq")),
        op=fields["op"].upper().lstrip("_"),
        numel_in=numel,
        numel_out=_number(fields.get("numel_out")),
        began_ns=event.t_ns - ran_ms * 1_000_000 if event.t_ns is not None else None,
        inner=_inner(event),
        limit_ms=int(fields["timeout_ms"]),
        ran_ms=ran_ms,
    )


def _statuses(case: Case) -> Iterator[tuple[Status, int | None]]:
    for event in case.of("nccl-status"):
        rank = _rank(event)
        if rank is not None:
            one = Status(
                rank=rank,
                group=_group(event),
                enqueued=int(event.fields["enqueued"]),
                completed=int(event.fields["completed"]),
                line=event.line,
                inner=_inner(event),
            )
            yield one, _number(event.fields.get("seq"))


def _short(statuses: list[tuple[Status, int | None]]) -> Iterator[Timeout]:
    """Time-outs of which only the short line is left, which names neither the operation nor its size."""
    for one, seq in statuses:
        if seq is not None and one.completed < seq and "imeout" in one.line.text and "dump signal" not in one.line.text:
            yield Timeout(rank=one.rank, line=one.line, group=one.group, seq=seq, inner=one.inner)


def _latest(statuses: list[tuple[Status, int | None]]) -> tuple[Status, ...]:
    """The first state a rank and group: what it prints again after it gave up says less."""
    kept: dict[tuple[int, str], Status] = {}
    for one, _seq in statuses:
        kept.setdefault((one.rank, one.group), one)
    return tuple(kept.values())


def _stacks(case: Case) -> dict[tuple[int, str], tuple[tuple[str, Line], ...]]:
    """`Stack trace of the failed collective:` and the `#n function from file:line` below it, per rank and file."""
    found: dict[tuple[int, str], tuple[tuple[str, Line], ...]] = {}
    rank: int | None = None
    frames: list[tuple[str, Line]] = []
    name = ""
    for line in case.lines:
        if "Stack trace of the failed collective:" in line.text:
            if rank is not None and frames:
                found.setdefault((rank, name), tuple(frames))
            rank, frames, name = _named_rank(line), [], line.artifact.name
        elif rank is not None:
            text = line.text.strip()
            if text.startswith(FRAME) and " from " in text and line.rank in (None, rank):
                frames.append((text.partition(" ")[2], line))
            elif frames:
                found.setdefault((rank, name), tuple(frames))
                rank, frames = None, []
    if rank is not None and frames:
        found.setdefault((rank, name), tuple(frames))
    return found


def _named_rank(line: Line) -> int | None:
    if line.rank is not None:
        return line.rank
    _before, found, after = line.text.partition("Rank ")
    digits = after.partition("]")[0]
    return int(digits) if found and digits.isdigit() else None
