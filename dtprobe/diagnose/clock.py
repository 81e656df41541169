"""Events on one clock: how far the hosts' clocks are apart, when a stuck operation began, and the job's moments in their order.

Two hosts are compared by what happened to them at the same time: the beginning of the same stuck collective, the making of the
same communicator. Where the run itself measured how far its hosts' clocks were off, lines stand on one clock already
(`dtprobe.diagnose.hosts`) and nothing is guessed from them. Offsets near a multiple of a quarter of an hour are of time zones, the rest is skew.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from dtprobe.diagnose.case import Case, Event, Line
from dtprobe.diagnose.diagnosis import Moment
from dtprobe.diagnose.signatures import signatures

SECOND = 10**9
ZONE_STEP = 900 * SECOND
SYNCHRONISED = SECOND
"""What clocks of hosts are taken to differ by at most where nothing compares them, as time servers keep them."""
ZONES = 14 * 3600 * SECOND
"""How far a stamp without a zone may be from UTC."""
MOST = 200

_RAN = re.compile(
    r"\bran for (\d{1,12}) milliseconds|\b(?:waiting|waited)(?: for)? (\d{1,12}) ?ms\b|\b[Tt]imed out after (\d{1,9}) seconds waiting\b"
)
_WORK = re.compile(r"WorkNCCL\((?:SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)).*? ran for (?P<ms>\d{1,12}) milliseconds")
_GROUP = re.compile(r"\[PG (?:ID )?(\d+)")
_MADE = re.compile(r"\bcommId (?P<id>0x[0-9a-f]+) - Init (?P<what>START|COMPLETE)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """What is added to a host's stamps to put them on the reference host's clock, and how far that may be off."""

    offset_ns: int = 0
    uncertainty_ns: int = 0
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The job's clock. `reference` is the host whose clock it is, null where no line names one."""

    reference: str | None = None
    offsets: Mapping[str, Offset] = field(default_factory=dict)
    mixed_zones: bool = False

    def moment(self, line: Line, text: str, *, ago_ns: int = 0) -> Moment:
        """When that was on the job's clock, `ago_ns` before the line's own time; `t_ns` is null where the line tells no time."""
        where = {"rank": line.rank, "host": line.host, "file": line.artifact.name, "line": line.number}
        if line.t_ns is None:
            return Moment(t_ns=None, text=text, **where)  # type: ignore[arg-type]
        known = line.artifact.measured
        offset = (
            self.offset(line.host) if known is None else Offset(uncertainty_ns=known.uncertainty_ns, why="measured in the run")
        )
        unplaced = ZONES if self.mixed_zones and not line.zoned else 0
        uncertainty = resolution_ns(line.t_ns) + offset.uncertainty_ns + unplaced
        return Moment(t_ns=line.t_ns + offset.offset_ns - ago_ns, text=text, uncertainty_ns=uncertainty, **where)  # type: ignore[arg-type]

    def offset(self, host: str | None) -> Offset:
        """Of a host; of one that nothing compares, as far as time servers keep it."""
        if host is None or host == self.reference or self.reference is None:
            return Offset()
        return self.offsets.get(host, Offset(uncertainty_ns=SYNCHRONISED, why="nothing compares its clock"))


def resolution_ns(t_ns: int) -> int:
    """How finely a stamp was written, by its zeros: a second, a millisecond, a microsecond."""
    return SECOND if t_ns % SECOND == 0 else 10**6 if t_ns % 10**6 == 0 else 1000


def ran_for_ns(text: str) -> int | None:
    """How long an operation had been waited for when it was given up: `ran for 600021 milliseconds`, gloo's `waiting 1800000ms`."""
    match = _RAN.search(text)
    if match is None:
        return None
    return int(match[1] or match[2]) * 10**6 if match[3] is None else int(match[3]) * SECOND


def one_clock(lines: Sequence[Line]) -> Clock:
    """The clock of these lines: offsets from what happened on several hosts at the same time."""
    together: dict[tuple[str, ...], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    count: dict[str, int] = defaultdict(int)
    zoned = bare = False
    for line in lines:
        if line.t_ns is None:
            continue
        zoned, bare = zoned or line.zoned, bare or not line.zoned
        if line.host is None or line.artifact.measured is not None:
            continue  # nothing is to be guessed from a line whose host's clock was measured
        count[line.host] += 1
        if "WorkNCCL(" in line.text and (work := _WORK.search(line.text)) is not None:
            group = _GROUP.search(line.text)
            key = ("work", group[1] if group else "", work["seq"], work["op"])
            together[key][line.host].append(line.t_ns - int(work["ms"]) * 10**6)
        elif "commId" in line.text and (made := _MADE.search(line.text)) is not None:
            together["made", made["id"], made["what"]][line.host].append(line.t_ns)
    reference = max(sorted(count), key=lambda host: count[host]) if count else None
    offsets = {host: _offset(host, str(reference), together) for host in count if host != reference}
    return Clock(
        reference=reference,
        offsets={host: offset for host, offset in offsets.items() if offset is not None},
        mixed_zones=zoned and bare,
    )


def _offset(host: str, reference: str, together: Mapping[tuple[str, ...], Mapping[str, Sequence[int]]]) -> Offset | None:
    """The median over what both hosts saw; it may be off by as much as these differ among themselves, and by a rank that came late."""
    differences, spread = [], 0
    for seen in together.values():
        if host in seen and reference in seen:
            here, there = seen[host], seen[reference]
            differences.append(int(median(there) - median(here)))
            spread = max(spread, max(here) - min(here), max(there) - min(there))
    if not differences:
        return None
    middle = int(median(differences))
    zone = round(middle / ZONE_STEP) * ZONE_STEP
    spread = max(spread, resolution_ns(middle), *(abs(one - middle) for one in differences))
    if not zone and abs(middle) <= spread + 5 * SECOND:
        # the ranks of the hosts did not begin at the very same time: so small a difference need not be the clocks'
        return Offset(uncertainty_ns=max(abs(middle), spread), why=f"{len(differences)} events seen by both hosts agree")
    why = f"{len(differences)} events seen by both hosts" + (
        f"; time zones {zone // SECOND // 60:+} minutes apart" if zone else ""
    )
    return Offset(offset_ns=middle, uncertainty_ns=max(spread, SYNCHRONISED), why=why)


def timeline(case: Case) -> tuple[Moment, ...]:
    """What happened, in its order: the first event of each kind on each rank, and where a stuck operation began. At most MOST.

    Moments without a time stand at the end, in the order in which they were read.
    """
    clock = one_clock(case.lines)
    moments: list[Moment] = []
    seen: set[tuple[str, int | None, str | None]] = set()
    begun: set[tuple[str, int | None, str | None]] = set()
    for event in _important_first(case.events):
        key = (event.signature, event.rank, event.host)
        if key in seen or len(moments) >= MOST:
            continue
        seen.add(key)
        moments.append(clock.moment(event.line, event.line.text.strip()[:160]))
        ago_ns = ran_for_ns(event.line.text)
        began = (_began(event.line), event.line.rank, event.line.host)
        if ago_ns is not None and event.line.t_ns is not None and began not in begun:
            begun.add(began)
            moments.append(clock.moment(event.line, began[0], ago_ns=ago_ns))
    return ordered(moments)


def _important_first(events: Sequence[Event]) -> Iterable[Event]:
    known = signatures()
    rank = {"cause": 0, "effect": 1, "confirm": 2}
    return sorted(events, key=lambda one: rank.get(known[one.signature].role, 3) if one.signature in known else 3)


def _began(line: Line) -> str:
    work = _WORK.search(line.text)
    return f"began to wait in {work['op']} number {work['seq']}" if work else "began to wait"


def ordered(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """By time; those without one at the end."""
    return tuple(sorted(moments, key=lambda one: (one.t_ns is None, one.t_ns or 0)))
