"""The timeline of a diagnosis as lanes on one clock, silences cut out. Everything is computed here; `lanes_picture` only draws."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Literal

from dtprobe.diagnose.diagnosis import HEALTHY, UNDETERMINED, Diagnosis, Moment, Operation
from dtprobe.report import words

LANES = 24
TOLD = 60
"""Moments in the list."""
BARS = 24
"""Operations drawn of a lane: the last ones."""
CUT_SHARE = 0.3
"""A silence longer than this share of what is left is cut out of the picture."""
LEAST_CUT = 0.04
"""And at least this share of all: one after the other, cuts would else become trifles."""
CUTS = 4
ALIKE = 3
"""So many moments that are alike but for their numbers are told as one."""
QUIET_LANES = 8
"""Of lanes that neither failed nor have evidence so many are drawn, where there are more than LANES."""
SECOND = 10**9

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")

Part = Literal["cause", "effect", "confirm", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A moment in words, or several alike. `number` stands in picture and list, `clock` is the UTC time of day, `since` the time after zero.

    `off` says how far the first may be off against the others, "" where by nothing that shows; `more` where there are several.
    """

    number: int
    moments: tuple[Moment, ...]
    part: Part
    clock: str
    since: str
    off: str
    who: str
    text: str
    where: str
    more: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment of a lane, with the number of its row."""

    number: int
    t_ns: int
    uncertainty_ns: int
    part: Part
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A rank, or a host, or the job, with what is drawn of it."""

    name: str
    host: str | None
    blamed: bool
    marks: tuple[Mark, ...]
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part of the time axis without a cut, in UTC nanoseconds."""

    begin_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """`zero_ns` is the first failure, None where no moment has a time. `stretches` are empty where there is nothing to draw.

    `untold` moments and `undrawn` lanes were left out. A moment without a time stands in the list only, and where others have one
    only if it is evidence.
    """

    zero_ns: int | None
    zero: str
    day: str
    rows: tuple[Row, ...]
    lanes: tuple[Lane, ...]
    stretches: tuple[Stretch, ...]
    untold: int
    undrawn: int
    summary: str


def timeline(diagnosis: Diagnosis) -> Timeline:
    """What happened when, the most telling moments of it."""
    blamed = blamed_ranks(diagnosis)
    parts = [(moment, _part(moment, diagnosis)) for moment in _once(diagnosis.timeline)]
    zero_ns, zero = _zero(parts, diagnosis)
    placed = [one for one in parts if one[0].t_ns is not None or one[1] != "other" or zero_ns is None]
    chosen = _chosen(_groups(placed, blamed), blamed)
    rows = tuple(_row(number, moments, part, zero_ns) for number, (moments, part) in enumerate(chosen, 1))
    lanes, undrawn = _lanes(rows, diagnosis)
    return Timeline(
        zero_ns=zero_ns,
        zero=zero,
        day=_utc(zero_ns).strftime("%Y-%m-%d") if zero_ns is not None else "",
        rows=rows,
        lanes=lanes,
        stretches=_stretches(lanes),
        untold=len(parts) - sum(len(row.moments) for row in rows),
        undrawn=undrawn,
        summary="; ".join(f"{row.since or 'at an unknown time'} {row.who}: {row.text}" for row in rows[:12]),
    )


def _once(moments: Sequence[Moment]) -> list[Moment]:
    """Each line once, though several rules may have seen it."""
    return list({(one.t_ns, one.file, one.line, one.rank, one.host, one.text): one for one in moments}.values())


def _groups(parts: Sequence[tuple[Moment, Part]], blamed: frozenset[int]) -> list[tuple[tuple[Moment, ...], Part]]:
    """Moments in the order of time; those alike but for their numbers are one, at the time of the first. A cause stands alone."""
    ordered = sorted(parts, key=lambda one: (one[0].t_ns is None, one[0].t_ns or 0))
    alike: dict[object, list[tuple[Moment, Part]]] = {}
    for number, (moment, part) in enumerate(ordered):
        key = (part, moment.rank in blamed, moment.rank is None, moment.t_ns is None, _NUMBERS.sub("0", moment.text[:400]))
        alike.setdefault(number if part == "cause" else key, []).append((moment, part))
    groups = []
    for found in alike.values():
        if len(found) >= ALIKE:
            groups.append((tuple(moment for moment, _ in found), found[0][1]))
        else:
            groups += [((moment,), part) for moment, part in found]
    return sorted(groups, key=lambda one: (one[0][0].t_ns is None, one[0][0].t_ns or 0))


def _part(moment: Moment, diagnosis: Diagnosis) -> Part:
    """What a moment is to the answer: what the evidence says that quotes the same line."""
    if moment.file is None:
        return "other"
    found: Iterable[Part] = (one.role for one in diagnosis.evidence if (one.file, one.line) == (moment.file, moment.line))
    return next(iter(found), "other")


def _zero(parts: Sequence[tuple[Moment, Part]], diagnosis: Diagnosis) -> tuple[int | None, str]:
    """The moment that times are counted from: the first cause, else the first of the rank that failed first, else the first."""
    timed = [(moment.t_ns, moment, part) for moment, part in parts if moment.t_ns is not None]
    if not timed:
        stuck = [one.begin_ns for one in diagnosis.operations if one.end_ns is None]
        if stuck:
            return min(stuck), "the first call that never ended"
        return (min(one.begin_ns for one in diagnosis.operations), "the first call") if diagnosis.operations else (None, "")
    if diagnosis.failure_mode not in (HEALTHY, UNDETERMINED):
        causes = [t_ns for t_ns, _, part in timed if part == "cause"]
        if causes:
            return min(causes), "the first line of the cause"
        first = diagnosis.first_failing_rank
        of_rank = [t_ns for t_ns, moment, _ in timed if isinstance(first, int) and moment.rank == first]
        if of_rank:
            return min(of_rank), f"the first moment of rank {first}"
    return min(t_ns for t_ns, _, _ in timed), "the first moment"


def _chosen(groups: Sequence[tuple[tuple[Moment, ...], Part]], blamed: frozenset[int]) -> list[tuple[tuple[Moment, ...], Part]]:
    """At most TOLD in their order: evidence and the blamed before others, the earliest before the late."""
    weight = {"cause": 0, "confirm": 1, "effect": 2, "other": 4}

    def key(at: int) -> tuple[int, int]:
        moments, part = groups[at]
        return min(weight[part], 3 if moments[0].rank in blamed else 4), at

    return [groups[at] for at in sorted(sorted(range(len(groups)), key=key)[:TOLD])]


def blamed_ranks(diagnosis: Diagnosis) -> frozenset[int]:
    """The rank that failed first, and the suspects."""
    first = diagnosis.first_failing_rank
    return frozenset(diagnosis.suspects) | (frozenset((first,)) if isinstance(first, int) else frozenset())


def _row(number: int, moments: tuple[Moment, ...], part: Part, zero_ns: int | None) -> Row:
    moment, last = moments[0], moments[-1]
    t_ns = moment.t_ns
    more = ""
    if len(moments) > 1:
        more = f"{len(moments):,} alike"
        if last.t_ns is not None and zero_ns is not None and since(last.t_ns - zero_ns) != since((t_ns or 0) - zero_ns):
            more += f", the last {since(last.t_ns - zero_ns)}"
    ranks = [one.rank for one in moments if one.rank is not None]
    hosts = {one.host for one in moments}
    host = moment.host if len(hosts) == 1 else None
    at = f" on {words.clip(host, 60)}" if host else f" on {len(hosts):,} hosts" if len(hosts) > 1 else ""
    return Row(
        number=number,
        moments=moments,
        part=part,
        clock=clock(t_ns) if t_ns is not None else "",
        since=since(t_ns - zero_ns) if t_ns is not None and zero_ns is not None else "",
        off=duration(moment.uncertainty_ns) if t_ns is not None and moment.uncertainty_ns >= 1_000_000 else "",
        who=words.clip(f"{words.ranks(ranks)}{at}", 160) if ranks else words.clip(host or "", 60),
        text=words.clip(moment.text, 300),
        where=place(moment.file, moment.line),
        more=more,
    )


def _lanes(rows: Sequence[Row], diagnosis: Diagnosis) -> tuple[tuple[Lane, ...], int]:
    """A lane for each rank, and for each host or the job as a whole where a moment names no rank; how many more there are."""
    blamed = blamed_ranks(diagnosis)
    told = [(row, moment) for row in rows for moment in row.moments if moment.t_ns is not None]
    hosts = {moment.rank: moment.host for _, moment in told if moment.rank is not None and moment.host is not None}
    if diagnosis.host is not None and isinstance(diagnosis.first_failing_rank, int):
        hosts[diagnosis.first_failing_rank] = diagnosis.host
    operations: dict[int, list[Operation]] = {}
    for one in sorted(diagnosis.operations, key=lambda one: one.begin_ns):
        operations.setdefault(one.rank, []).append(one)
    marks: dict[tuple[str | None, int | None], list[Mark]] = {}
    for row, moment in told:
        key = (hosts.get(moment.rank) if moment.rank is not None else moment.host, moment.rank)
        mark = Mark(
            number=row.number, t_ns=moment.t_ns or 0, uncertainty_ns=moment.uncertainty_ns, part=row.part, text=row.text
        )
        marks.setdefault(key, []).append(mark)
    for rank in operations:
        marks.setdefault((hosts.get(rank), rank), [])
    lanes = [
        Lane(
            name=words.clip(f"rank {rank}" if rank is not None else host or "job", 60),
            host=words.clip(host, 60) if host else None,
            blamed=rank in blamed,
            marks=tuple(sorted(found, key=lambda mark: mark.t_ns)),
            operations=tuple(operations.get(rank, [])[-BARS:]) if rank is not None else (),
        )
        for (host, rank), found in sorted(
            marks.items(), key=lambda item: (item[0][0] or "", item[0][1] is not None, item[0][1] or 0)
        )
    ]
    if len(lanes) <= LANES:
        return tuple(lanes), 0
    loud = [lane for lane in lanes if lane.blamed or any(mark.part != "other" for mark in lane.marks)]
    quiet = [lane for lane in lanes if lane not in loud]
    shown = [*sorted(loud, key=lambda lane: not lane.blamed)[: LANES - QUIET_LANES], *quiet[:QUIET_LANES]]
    return tuple(lane for lane in lanes if lane in shown), len(lanes) - len(shown)


def _stretches(lanes: Sequence[Lane]) -> tuple[Stretch, ...]:
    """The time that is drawn: from the first to the last moment, without its long silences."""
    spans = sorted(_spans(lanes))
    if not spans:
        return ()
    joined = [list(spans[0])]
    for begin, end in spans[1:]:
        if begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    gaps = sorted(((b[0] - a[1], a[1], b[0]) for a, b in pairwise(joined)), reverse=True)
    whole = left = joined[-1][1] - joined[0][0]
    cuts = []
    for length, begin, end in gaps[:CUTS]:
        if length < max(CUT_SHARE * left, LEAST_CUT * whole) or len(gaps) < 2:
            break
        cuts.append((begin, end))
        left -= length
    begins = [joined[0][0], *(end for _, end in sorted(cuts))]
    ends = [*(begin for begin, _ in sorted(cuts)), joined[-1][1]]
    return tuple(Stretch(begin_ns=begin, end_ns=end) for begin, end in zip(begins, ends, strict=True))


def _spans(lanes: Sequence[Lane]) -> list[tuple[int, int]]:
    """When something is drawn: moments with what they may be off by, in so far as that leaves room for the others."""
    times = [mark.t_ns for lane in lanes for mark in lane.marks]
    most = (max(times) - min(times)) // 4 if times else 0
    spans = []
    for lane in lanes:
        for mark in lane.marks:
            off = min(mark.uncertainty_ns, most)
            spans.append((mark.t_ns - off, mark.t_ns + off))
        spans += [(one.begin_ns, max(one.begin_ns, one.end_ns or one.begin_ns)) for one in lane.operations]
    return spans


def place(file: str | None, line: int | None) -> str:
    """`logs/rank3.log:120`."""
    if file is None:
        return ""
    shown = words.clip(file, 300).replace("\n", "\\n")
    return shown if line is None else f"{shown}:{line}"


def _utc(t_ns: int) -> datetime:
    return datetime.fromtimestamp(t_ns // SECOND, UTC)


def clock(t_ns: int) -> str:
    """The time of day in UTC, to the millisecond."""
    return f"{_utc(t_ns):%H:%M:%S}.{t_ns % SECOND // 1_000_000:03d}"


def since(ns: int) -> str:
    """`0`, `+2.5 s`, `-12 min`."""
    if abs(ns) < 500_000:
        return "0"
    return f"{'-' if ns < 0 else '+'}{duration(abs(ns))}"


def duration(ns: float) -> str:
    """A length of time in the unit that fits: `20 ms`, `2.5 s`, `12 min 30 s`, `3 h 5 min`, `2 d 4 h`."""
    seconds = ns / SECOND
    if seconds < 59.95:
        return words.number(round(seconds, 3 if seconds < 1 else 1), "s")
    scales = ((3600.0, 1, 60, "min", "s"), (86400.0, 60, 60, "h", "min"), (math.inf, 3600, 24, "d", "h"))
    part, size, unit, lower = next(scale[1:] for scale in scales if seconds < scale[0])
    whole, rest = divmod(round(seconds / part), size)
    return f"{whole:,} {unit} {rest} {lower}" if rest and whole < 100 else f"{whole:,} {unit}"
