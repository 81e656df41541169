"""Who is missing where the others wait: time-outs and mismatch reports of all ranks matched against each other."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from dtprobe.diagnose.case import Case, Event, Finding, First, Line, Quote, Role, quote
from dtprobe.diagnose.facts.ends import ends
from dtprobe.diagnose.facts.hang import Hang, hang, world
from dtprobe.diagnose.facts.timeouts import Timeout, waits
from dtprobe.diagnose.facts.words import words

TINY = 64
"""A reduction of so few elements is a counter, a flag or a barrier, not the training's own."""
RATIO = 8.0
"""Sizes further apart than this are not the same collective with another batch."""
GATHERS = frozenset({"ALLGATHER", "ALLGATHER_BASE", "ALLGATHER_COALESCED", "GATHER", "REDUCE_SCATTER", "REDUCE_SCATTER_BASE"})
SHARDED = frozenset({"ALLGATHER_BASE", "ALLGATHER_COALESCED", "REDUCE_SCATTER_BASE"})
SEVERAL = 4
EXCHANGED = 0.8


def analyse(case: Case) -> Iterator[Finding]:
    """One finding or two for the earliest hang."""
    found = hang(case)
    if found is not None:
        swapped = _exchanged(case, found)
        if swapped is not None:
            yield swapped
        yield from _hang(case, found)


def _exchanged(case: Case, one: Hang) -> Finding | None:
    """Two ranks that brought the same two calls to the same two places, each the other way round."""
    calls: dict[int, dict[int, Timeout]] = defaultdict(dict)
    for item in waits(case).every:
        if item.group == one.group and item.seq is not None and (item.op is not None or item.numel_in is not None):
            calls[item.seq].setdefault(item.rank, item)
    for seq, then in pairwise(sorted(calls)):
        here, there = calls[seq], calls[then]
        both = sorted(set(here) & set(there))
        orders: dict[tuple[_Key, _Key], list[int]] = defaultdict(list)
        for rank in both:
            orders[_key(here[rank]), _key(there[rank])].append(rank)
        pair = next(((a, b) for a, b in orders if a != b and (b, a) in orders), None)
        if pair is not None:
            sides = sorted((orders[pair], orders[pair[1], pair[0]]), key=len)
            return _exchange(one, here, there, sides[0], sides[1])
    return None


_Key = tuple[str | None, int | None]


def _key(item: Timeout) -> _Key:
    return item.op, item.numel_in


def _exchange(
    one: Hang, here: Mapping[int, Timeout], there: Mapping[int, Timeout], few: Sequence[int], many: Sequence[int]
) -> Finding:
    tie = len(few) == len(many)
    mine, theirs = few[0], many[0]
    return Finding(
        mode="collective-order-mismatch",
        analyst="watchdog",
        likelihood=EXCHANGED,
        because=f"{named(few)} called {here[mine].what} and then {there[mine].what}, {named(many)} the same two the other way round.",
        first=None if tie else first_of(few),
        suspects=tuple(sorted({*few, *many})) if tie else tuple(few) if len(few) <= SEVERAL else (),
        at_ns=one.began_ns,
        evidence=tuple(quote(item.line, "cause") for item in (here[mine], there[mine], here[theirs], there[theirs])),
        not_proven="which of the two orders is the wrong one" if tie else "why the orders differ",
    )


def named(ranks: Sequence[int]) -> str:
    """The ranks in words, the first of many."""
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}" + (", ..." if len(ranks) > 8 else "")


def first_of(ranks: Sequence[int]) -> First:
    """The first of a few ranks; none where they are too many to name one."""
    return ranks[0] if ranks and len(ranks) <= SEVERAL else None


def _hang(case: Case, one: Hang) -> Iterator[Finding]:
    match one.kind:
        case "absent":
            yield _absent(case, one)
        case "frozen":
            yield _frozen(case, one)
        case "late":
            yield _late(case, one)
        case "halfway":
            yield _halfway(case, one)
        case "other-operation":
            yield _other_operation(one)
        case "other-size":
            yield from _other_size(case, one)
        case "other-place":
            yield _other_place(case, one)
        case "p2p":
            yield from _p2p(case, one)
        case "nobody":
            yield _nobody(case, one)
        case "some":
            pass
    if one.crossed:
        yield Finding(
            mode="cross-communicator-deadlock",
            analyst="watchdog",
            likelihood=0.6,
            because=f"{named(one.waiting)} wait in group {one.group} while others wait in {', '.join(one.crossed)}.",
            suspects=tuple(sorted({item.rank for item in waits(case).timeouts})),
            evidence=_crossed(case),
            at_ns=one.began_ns,
            not_proven="which of the two orders is the wrong one",
        )


def _crossed(case: Case) -> tuple[Quote, ...]:
    """Who waits, and how far each rank is in which group."""
    lines = [item.line for item in waits(case).timeouts[:SEVERAL]] + [item.line for item in waits(case).statuses[:SEVERAL]]
    return tuple(quote(line, "cause") for line in lines)


def _evidence(case: Case, one: Hang) -> tuple[Quote, ...]:
    """The odd rank's own state or time-out first, then a rank that waits, then what the odd one said last."""
    found: list[tuple[Line, Role]] = []
    for rank in one.odd[:2]:
        mine = one.of(rank)
        status = waits(case).status(rank, one.group)
        if mine is not None:
            found.append((mine.line, "cause"))
        if status is not None and (mine is None or status.enqueued < _most_enqueued(case, one)):
            found.append((status.line, "cause"))
        said = words(case).last(rank)
        if said is not None:
            found.append((said, "confirm"))
    typical = one.typical
    if typical is not None:
        found.append((typical.line, "effect"))
        found += [(line, "confirm") for line in (typical.place_line,) if line is not None]
    elif one.line is not None:
        found.append((one.line, "effect"))
    return tuple(quote(line, role) for line, role in found)


def _most_enqueued(case: Case, one: Hang) -> int:
    return max((status.enqueued for status in waits(case).statuses if status.group == one.group), default=0)


def _of_the_odd(case: Case, one: Hang, *, mode: str, likelihood: float, because: str, not_proven: str) -> Finding:
    """A finding that blames the odd ranks of the hang."""
    return Finding(
        mode=mode,
        analyst="watchdog",
        likelihood=likelihood,
        because=because,
        first=first_of(one.odd),
        suspects=one.odd if len(one.odd) <= SEVERAL else (),
        at_ns=one.began_ns,
        evidence=_evidence(case, one),
        not_proven=not_proven,
    )


def _absent(case: Case, one: Hang) -> Finding:
    ended = {end.rank for end in ends(case) if end.signal == signal.SIGTERM and not end.forced}
    alive = [rank for rank in one.odd if rank in ended or words(case).last(rank) or waits(case).status(rank, one.group)]
    typical = one.typical
    what = typical.what if typical else "a collective"
    told = [rank for rank in one.odd if waits(case).status(rank, one.group)]
    if len(one.odd) > SEVERAL:
        likelihood = 0.3
    elif told:
        likelihood = 0.66
    else:
        likelihood = 0.55 if alive else 0.45
    silent = not alive and len(one.odd) == 1 and len(one.waiting) > 1
    return _of_the_odd(
        case,
        one,
        mode="rank-lost" if silent else "collective-skipped",
        likelihood=0.5 if silent else likelihood,
        because=f"{named(one.waiting)} waited in {what} until the time-out; {named(one.odd)} never entered it"
        + (" and said nothing any more." if silent else "."),
        not_proven="what the missing rank did instead: it may have skipped the call, be busy, be stopped or be gone",
    )


def _frozen(case: Case, one: Hang) -> Finding:
    mine, typical = _pair(one)
    seen = f"after {mine.ran_ms / 1e3:.0f} s" if mine is not None and mine.ran_ms else "late"
    limit = f"the time-out of {mine.limit_ms / 1e3:.0f} s" if mine is not None and mine.limit_ms else "its time-out"
    waited = f", {named(one.waiting)} in time" if typical is not None else ""
    return _of_the_odd(
        case,
        one,
        mode="rank-stopped",
        likelihood=0.72,
        because=f"the watchdog of {named(one.odd)} saw {limit} only {seen}{waited}: the process did not run in between",
        not_proven="what stopped it: a signal, a debugger, a frozen container, or a call into the driver that held its watchdog up",
    )


def _late(case: Case, one: Hang) -> Finding:
    mine, typical = _pair(one)
    began = [item.began_ns for item in (typical, mine) if item is not None and item.began_ns is not None]
    after = f"{(began[1] - began[0]) / 1e9:.0f} s after {named(one.waiting)}" if len(began) == 2 else "late"
    what = typical.what if typical else "the collective"
    return _of_the_odd(
        case,
        one,
        mode="collective-skipped",
        likelihood=0.66,
        because=f"{named(one.odd)} came to {what} {after}, which had given up by then",
        not_proven="what it did meanwhile: other work, other calls, or nothing while it was stopped",
    )


def _halfway(case: Case, one: Hang) -> Finding:
    mine = _pair(one)[0]
    what = mine.what if mine else "a broadcast"
    return Finding(
        mode="broadcast-root-mismatch",
        analyst="watchdog",
        likelihood=0.6,
        because=f"{named(one.odd)} waited in {what}, which {named(one.waiting)} had left, and all had enqueued as many calls: a root sends and "
        "goes on, so the ranks may hold different ones for it",
        suspects=tuple(sorted({*one.odd, *one.waiting})) if len(one.odd) + len(one.waiting) <= SEVERAL else (),
        at_ns=one.began_ns,
        evidence=_evidence(case, one),
        not_proven="the roots, which are recorded nowhere; a link that lost what the root sent looks the same",
    )


def _pair(one: Hang) -> tuple[Timeout | None, Timeout | None]:
    return (one.of(one.odd[0]) if one.odd else None, one.typical)


def _said(mine: Timeout | None, typical: Timeout | None, one: Hang) -> str:
    if mine is None or typical is None:
        return f"{named(one.odd)} and {named(one.waiting)} wait in different collectives."
    return f"{named(one.odd)} waited in {mine.what} while {named(one.waiting)} waited in {typical.what}."


def _timeout_quotes(one: Hang) -> tuple[Quote, ...]:
    mine, typical = _pair(one)
    both = [item for item in (mine, typical) if item is not None]
    quotes = [quote(item.line, "cause") for item in both]
    return (*quotes, *(quote(item.place_line, "confirm") for item in both if item.place_line is not None))


def _other_operation(one: Hang) -> Finding:
    mine, typical = _pair(one)
    main_only = one.odd == (0,) and len(one.waiting) > 1 and mine is not None and mine.op in GATHERS | {"BROADCAST", "SCATTER"}
    mode = "rank-conditional-collective" if main_only else "collective-type-mismatch"
    return Finding(
        mode=mode,
        analyst="watchdog",
        likelihood=0.62 if main_only else 0.6,
        because=_said(mine, typical, one)
        + (" Only the main rank called it, so it stands under a rank condition." if main_only else ""),
        first=first_of(one.odd),
        suspects=one.odd if len(one.odd) <= SEVERAL else (),
        at_ns=one.began_ns,
        evidence=_timeout_quotes(one),
        not_proven="which of the two code paths is the wrong one",
    )


def _other_size(case: Case, one: Hang) -> Iterator[Finding]:
    mine, typical = _pair(one)
    if mine is None or typical is None or not mine.numel_in or not typical.numel_in:
        return
    low, high = sorted((mine.numel_in, typical.numel_in))
    apart = high / low >= RATIO
    # shards of another parameter were asked for, which the sharding library remarks itself
    branch = case.of("trace-invalidated")[:1] if mine.op in SHARDED else []
    if low <= TINY and apart and mine.op not in GATHERS:
        yield _sized(one, "data-dependent-branch-desync", 0.5, "why it is there")
        if mine.numel_in <= TINY:
            yield _sized(one, "uneven-dataloader-desync", 0.52, "that its data had ended")
    elif apart or branch:
        likely = 0.66 if mine.op in SHARDED else 0.55
        yield _sized(one, "data-dependent-branch-desync", likely, "which branch of the program it took", branch)
    else:
        yield _sized(one, "collective-shape-mismatch", 0.68, "why the sizes differ")
        if mine.op in SHARDED:
            yield _sized(one, "data-dependent-branch-desync", 0.48, "which branch of the program it took")


def _sized(one: Hang, mode: str, likelihood: float, not_proven: str, told: Sequence[Event] = ()) -> Finding:
    mine, typical = _pair(one)
    return Finding(
        mode=mode,
        analyst="watchdog",
        likelihood=likelihood,
        because=_said(mine, typical, one),
        first=first_of(one.odd),
        suspects=one.odd if len(one.odd) <= SEVERAL else (),
        at_ns=one.began_ns,
        evidence=(*_timeout_quotes(one), *(quote(event.line, "confirm") for event in told)),
        not_proven=not_proven,
    )


def _other_place(case: Case, one: Hang) -> Finding:
    mine, typical = _pair(one)
    here = mine.place if mine else None
    there = typical.place if typical else None
    return Finding(
        mode="data-dependent-branch-desync",
        analyst="watchdog",
        likelihood=0.55,
        because=f"{named(one.odd)} waits at {here or 'another line'}, {named(one.waiting)} wait at {there or 'the same line'}.",
        first=first_of(one.odd),
        suspects=one.odd if len(one.odd) <= SEVERAL else (),
        at_ns=one.began_ns,
        evidence=_timeout_quotes(one) or _evidence(case, one),
        not_proven="why the ranks took different ways",
    )


def _p2p(case: Case, one: Hang) -> Iterator[Finding]:
    ops = Counter([item.op for item in one.timeouts] or one.calls)
    sends, receives = ops.get("SEND", 0), ops.get("RECV", 0)
    mode = "send-send-deadlock" if sends > 1 and not receives else "p2p-unpaired"
    source = _source(one, world(case)) if receives and not sends else None
    suspects = (source,) if source is not None else one.waiting if len(one.waiting) <= SEVERAL else ()
    yield Finding(
        mode=mode,
        analyst="watchdog",
        likelihood=0.6 if sends == 0 or receives == 0 else 0.45,
        because=f"{sends} sends and {receives} receives timed out: no partner came."
        + (f" The chain of receives begins behind rank {source}, which waits for nobody." if source is not None else ""),
        first=source,
        suspects=suspects,
        at_ns=one.began_ns,
        evidence=(
            *(
                tuple(quote(item.line, "cause") for item in one.timeouts[:SEVERAL])
                or ((quote(one.line, "cause"),) if one.line else ())
            ),
            *(quote(line, "confirm") for rank in suspects[:SEVERAL] if (line := words(case).last(rank)) is not None),
        ),
        not_proven="which side lacks its partner",
    )


def _source(one: Hang, everybody: frozenset[int]) -> int | None:
    """The stage before a chain of stages that all receive, up to an end of the pipeline: the one whose send they wait for."""
    waiting = set(one.waiting)
    low, high, last = min(waiting), max(waiting), max(everybody, default=0)
    if len(waiting) < 2 or waiting != set(range(low, high + 1)):
        return None
    if low > 0 and high == last:
        return low - 1
    return high + 1 if low == 0 and high < last else None


def _nobody(case: Case, one: Hang) -> Finding:
    heard = len(one.waiting) >= max(2, len(world(case)))
    what = one.typical.what if one.typical else "the same operation"
    return Finding(
        mode="symmetric-hang",
        analyst="watchdog",
        likelihood=0.6 if heard else 0.4,
        because=f"All {len(one.waiting)} ranks entered {what} and none of them completed it; no rank is behind.",
        first="all",
        at_ns=one.began_ns,
        evidence=tuple(quote(item.line, "cause") for item in one.timeouts[:2])
        or ((quote(one.line, "cause"),) if one.line else ()),
        not_proven="which link or which device does not deliver; roots and reduce operations are not in these lines",
    )
