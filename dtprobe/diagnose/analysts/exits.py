"""How processes ended: who died of what, who only followed, and who left early while its peers still waited."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence

from dtprobe.diagnose.case import Case, Finding, Line, Quote, quote
from dtprobe.diagnose.facts.ends import End, ends
from dtprobe.diagnose.facts.hang import world
from dtprobe.diagnose.facts.raised import Raised, raised
from dtprobe.diagnose.facts.timeouts import waits
from dtprobe.diagnose.facts.words import LAST, says, shape, words

_MODES = {
    signal.SIGKILL: ("rank-killed", 0.75),
    signal.SIGSEGV: ("sigsegv", 0.82),
    signal.SIGBUS: ("shm-too-small", 0.5),
    signal.SIGABRT: ("sigabrt", 0.55),
    signal.SIGILL: ("sigabrt", 0.5),
    signal.SIGFPE: ("sigabrt", 0.5),
}
_GONE = re.compile(
    r"(?i)connection (?:was )?(?:likely )?(?:reset|closed)|closed by (?:remote )?peer|remote process exited|got 0 bytes|broken pipe"
)
_STORE = re.compile(r"TCPStore|DistNetworkError|DistStoreError|recvValue|sendBytes|recvBytes")
_PEER = re.compile(
    r"(?:closed by (?:remote )?peer|reset by peer|remote=|peer:?) ?\[?(?:::ffff:)?(?P<address>\d+\.\d+\.\d+\.\d+)"
)
_BARE = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*Error: ")
_FOLLOWS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def analyse(case: Case) -> Iterator[Finding]:
    """A finding for the rank that died by a signal of its own, one for a plain error code, one for a rank that left early."""
    found = ends(case)
    died = [one for one in found if one.signal is not None and one.signal not in _FOLLOWS]
    own = [one for one in died if not one.forced and not _aborted_as_told(case, one)]
    if own:
        yield _signal(case, own)
    yield from _native(case, own)
    yield from _forced(case, [one for one in died if one.forced])
    if not own:
        yield from _code(case, found)
    yield from _left_early(case, found)
    yield from _lost(case)


def _aborted_as_told(case: Case, one: End) -> bool:
    """An abort is an effect where the watchdog of that rank, or of one that is not named, took it down."""
    if one.signal != signal.SIGABRT:
        return False
    joined = waits(case)
    told = joined.waiting() | {event.rank for event in case.of("watchdog-other-exception") if event.rank is not None}
    exceptions = [item for item in raised(case) if item.rank in (None, one.rank)]
    if one.rank is None:
        return bool(told) or bool(exceptions)
    return one.rank in told or (bool(case.of("watchdog-other-exception", "terminate-called")) and bool(told or exceptions))


def _signal(case: Case, own: Sequence[End]) -> Finding:
    order = {signal.SIGKILL: 1, signal.SIGABRT: 2}
    first = min(own, key=lambda one: order.get(signal.Signals(one.signal or 0), 0))
    name = signal.Signals(first.signal or 0)
    mode, likelihood = _MODES.get(name, ("sigabrt", 0.4))
    alike = [one for one in own if one.signal == first.signal]
    ranks = tuple(dict.fromkeys(one.rank for one in alike if one.rank is not None))
    everybody = len(ranks) > 1 and len(ranks) >= len(world(case))
    chosen = ranks[0] if ranks else None
    together = tuple(one.rank for one in alike if one.rank is not None and one.line is first.line)
    if len(ranks) > 1:
        likelihood -= 0.15
    return Finding(
        mode=mode,
        analyst="exits",
        likelihood=likelihood,
        because=f"{'A rank' if chosen is None else f'Rank {chosen}'} ended by {name.name}, and no other failure is told before it.",
        first="all" if everybody else chosen,
        suspects=() if everybody else together,
        host=first.host,
        at_ns=first.line.t_ns,
        evidence=(quote(first.line, "cause"),),
        not_proven="who sent the signal" if name is signal.SIGKILL else "",
    )


def _native(case: Case, own: Sequence[End]) -> Iterator[Finding]:
    """A native crash that its own process or the kernel tells of."""
    events = case.of("native-segfault")
    if not events:
        return
    line = events[0].line
    rank = line.rank
    if rank is None and line.pid is not None and (seat := case.who.at_pid(line.pid, line.host)):
        rank = seat.rank
    if rank is None:
        rank = next((one.rank for one in own if one.signal == signal.SIGSEGV and one.rank is not None), None)
    yield Finding(
        mode="sigsegv",
        analyst="native",
        likelihood=0.7,
        because=f"{'A process' if rank is None else f'Rank {rank}'} crashed with a segmentation fault.",
        first=rank,
        suspects=() if rank is None else (rank,),
        host=line.host,
        at_ns=events[0].t_ns,
        evidence=(*_frames(case, line), quote(line, "confirm")),
        not_proven="whose memory it was",
    )


def _frames(case: Case, line: Line) -> Iterator[Quote]:
    """The first frames of a native stack below this line."""
    near = [
        one for one in case.lines if one.artifact.name == line.artifact.name and line.number < one.number <= line.number + 12
    ]
    shown = 0
    for one in near:
        if one.text.lstrip().startswith(("#0", "#1", "#2", "[0x", "@ ")) and shown < 2:
            shown += 1
            yield quote(one, "cause")


def _forced(case: Case, forced: Sequence[End]) -> Iterator[Finding]:
    """A process that did not end at SIGTERM: stopped, in an uninterruptible wait, or its threads hold each other."""
    waiting = waits(case).waiting()
    for one in forced[:1]:
        if one.rank is not None and one.rank not in waiting and waiting:
            line = next(
                (event.line for event in case.of("elastic-forced") if event.fields.get("pid") == str(one.pid)), one.line
            )
            yield Finding(
                mode="rank-stopped",
                analyst="exits",
                likelihood=0.5,
                because=f"Rank {one.rank} reported no time-out as its peers did and did not end at SIGTERM: it was stopped or stuck.",
                first=one.rank,
                suspects=(one.rank,),
                host=one.host,
                evidence=(quote(line, "cause"), quote(one.line, "confirm")),
                not_proven="whether it was stopped, waited in the kernel or held a lock",
            )


def _code(case: Case, found: Sequence[End]) -> Iterator[Finding]:
    """A plain error code on one rank, its words lost."""
    failed = [one for one in found if one.code > 0 and not one.forced]
    ranks = tuple(dict.fromkeys(one.rank for one in failed if one.rank is not None))
    if len(ranks) == 1 and not raised(case) and not waits(case).timeouts:
        first = next(one for one in failed if one.rank is not None)
        yield Finding(
            mode="python-exception-one-rank",
            analyst="exits",
            likelihood=0.52,
            because=f"Rank {ranks[0]} ended with code {first.code}; its own words are missing.",
            first=ranks[0],
            suspects=ranks,
            host=first.host,
            evidence=(quote(first.line, "cause"),),
            not_proven="which exception it was",
        )


def _left_early(case: Case, found: Sequence[End]) -> Iterator[Finding]:
    """A rank that ended well while the others still needed it: they see its connections close."""
    exceptions = [one for one in raised(case) if not one.launcher and not one.ignored]
    if any(not one.effect for one in exceptions) or any(one.signal not in (None, *_FOLLOWS, signal.SIGABRT) for one in found):
        return
    lost = [one for one in exceptions if one.effect]
    waiting = waits(case).waiting()
    hurt = {one.rank for one in lost if one.rank is not None} | set(waiting)
    coded = {one.rank: one.line for one in found if one.code == 0 and one.rank is not None}
    if not lost:
        told_lost = [line for line in case.lines if line.rank is not None and line.rank not in coded and _lost_peer(line)]
        hurt |= {line.rank for line in told_lost if line.rank is not None}
    if not hurt and not lost:
        return
    clean = dict(coded)
    told = words(case)
    for rank, lines in told.by_rank.items():
        # what a rank says again and again is no last word
        ending = [line for line in lines[-2:] if says("says-clean-end", line) and _once(line, lines)]
        if rank not in hurt and ending:
            clean.setdefault(rank, ending[-1])
    ended = sorted(rank for rank in clean if rank not in hurt)
    if ended and len(ended) <= max(1, len(world(case)) // 2):
        yield _early(case, ended, clean, lost)


def _lost_peer(line: Line) -> bool:
    """An exception of a rank, its traceback lost, that a peer's end brought about."""
    return "Error" in line.text and _BARE.match(line.text) is not None and _GONE.search(line.text) is not None


def _once(line: Line, lines: Sequence[Line]) -> bool:
    said = shape(line.text)
    return sum(shape(one.text) == said for one in lines[-LAST:]) == 1


def _lost(case: Case) -> Iterator[Finding]:
    """Every rank but one reports that a connection closed: it is the one that is gone."""
    reports = [one for one in raised(case) if one.effect and one.rank is not None and _GONE.search(one.text)]
    told = {one.rank: one.line for one in reports} | {
        event.rank: event.line for event in case.events if event.rank is not None and _GONE.search(event.line.text)
    }
    silent = world(case) - {rank for rank in told if rank is not None}
    silent = silent & _at_address(case, [line.text for line in told.values()]) or silent
    if len(silent) == 1 and len(told) > 1:
        rank = next(iter(silent))
        seat = case.who.of(rank)
        hosted = rank == 0 and any(_STORE.search(line.text) for line in told.values())
        yield Finding(
            mode="store-host-lost" if hosted else "rank-lost",
            analyst="exits",
            likelihood=0.62 if hosted else 0.5,
            because=f"All ranks but {rank} report closed connections{' to the store' if hosted else ''}: rank {rank} went, "
            "and nothing of it says how.",
            first=rank,
            suspects=(rank,),
            host=seat.host if seat else None,
            evidence=tuple(quote(line, "effect") for line in list(told.values())[:3]),
            not_proven="how it ended",
        )


def _at_address(case: Case, texts: Sequence[str]) -> set[int]:
    """The ranks at the address that all reports name as the peer that went, where a map tells whose it is."""
    named = {found["address"] for text in texts if (found := _PEER.search(text))}
    addresses = {one for one in named if not one.startswith("127.")}
    return set(case.who.on(addresses.pop())) if len(addresses) == 1 else set()


def _early(case: Case, ended: Sequence[int], clean: dict[int, Line], lost: Sequence[Raised]) -> Finding:
    said = [line for rank in ended[:1] for line in words(case).by_rank.get(rank, ())[-2:] if says("says-clean-end", line)]
    reports = [clean[rank] for rank in ended[:1]]
    lines = list(dict.fromkeys((line.artifact.name, line.number) for line in (*said, *reports)))
    by_place = {(line.artifact.name, line.number): line for line in (*said, *reports)}
    return Finding(
        mode="peer-exited-early",
        analyst="exits",
        likelihood=0.78,
        because=f"Rank {ended[0]} ended while its peers still communicated; they saw closed connections or waited in vain.",
        first=ended[0],
        suspects=tuple(ended),
        evidence=(*(quote(by_place[place], "cause") for place in lines), *(quote(one.line, "effect") for one in lost[:2])),
        not_proven="why it left before the others",
    )
