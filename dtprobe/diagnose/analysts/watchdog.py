"""Who is missing where the others wait: time-outs and mismatch reports of all ranks matched against each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from dtprobe.diagnose.case import Case, Event, Finding, First, Line, Quote, quote
from dtprobe.diagnose.facts.hang import Hang, hang, world
from dtprobe.diagnose.facts.raised import raised
from dtprobe.diagnose.facts.timeouts import Timeout, waits
from dtprobe.diagnose.facts.words import words

TINY = 64
"""A reduction of so few elements is a counter, a flag or a barrier, not the training's own."""
RATIO = 8.0
"""Sizes further apart than this are not the same collective with another batch."""
GATHERS = frozenset({"ALLGATHER", "ALLGATHER_BASE", "ALLGATHER_COALESCED", "GATHER", "REDUCE_SCATTER", "REDUCE_SCATTER_BASE"})
SHARDED = frozenset({"ALLGATHER_BASE", "ALLGATHER_COALESCED", "REDUCE_SCATTER_BASE"})
SEVERAL = 4


def analyse(case: Case) -> Iterator[Finding]:
    """One finding for the earliest hang, and one for each report that names the guilty ranks itself."""
    yield from _fingerprints(case)
    yield from _barriers(case)
    yield from _reports(case)
    yield from _store(case)
    yield from _stuck_watchdog(case)
    yield from _lengths(case)
    found = hang(case)
    if found is not None:
        yield from _hang(case, found)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}" + (", ..." if len(ranks) > 8 else "")


def _first(ranks: Sequence[int]) -> First:
    return ranks[0] if ranks and len(ranks) <= SEVERAL else None


def _hang(case: Case, one: Hang) -> Iterator[Finding]:
    match one.kind:
        case "absent":
            yield _absent(case, one)
        case "other-operation":
            yield _other_operation(one)
        case "other-size":
            yield from _other_size(one)
        case "other-place":
            yield _other_place(case, one)
        case "p2p":
            yield from _p2p(one)
        case "nobody":
            yield _nobody(case, one)
        case "some":
            pass
    if one.crossed:
        yield Finding(
            mode="cross-communicator-deadlock",
            analyst="watchdog",
            likelihood=0.6,
            because=f"{_ranks(one.waiting)} wait in group {one.group} while others wait in {', '.join(one.crossed)}.",
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
    found: list[tuple[Line, str]] = []
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
    return tuple(quote(line, role) for line, role in found)  # type: ignore[arg-type]


def _most_enqueued(case: Case, one: Hang) -> int:
    return max((status.enqueued for status in waits(case).statuses if status.group == one.group), default=0)


def _absent(case: Case, one: Hang) -> Finding:
    alive = [rank for rank in one.odd if words(case).last(rank) or waits(case).status(rank, one.group)]
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
    return Finding(
        mode="rank-lost" if silent else "collective-skipped",
        analyst="watchdog",
        likelihood=0.5 if silent else likelihood,
        because=f"{_ranks(one.waiting)} waited in {what} until the time-out; {_ranks(one.odd)} never entered it"
        + (" and said nothing any more." if silent else "."),
        first=_first(one.odd),
        suspects=one.odd if len(one.odd) <= SEVERAL else (),
        at_ns=one.began_ns,
        evidence=_evidence(case, one),
        not_proven="what the missing rank did instead: it may have skipped the call, be busy, be stopped or be gone",
    )


def _pair(one: Hang) -> tuple[Timeout | None, Timeout | None]:
    return (one.of(one.odd[0]) if one.odd else None, one.typical)


def _said(mine: Timeout | None, typical: Timeout | None, one: Hang) -> str:
    if mine is None or typical is None:
        return f"{_ranks(one.odd)} and {_ranks(one.waiting)} wait in different collectives."
    return f"{_ranks(one.odd)} waited in {mine.what} while {_ranks(one.waiting)} waited in {typical.what}."


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
        first=_first(one.odd),
        suspects=one.odd if len(one.odd) <= SEVERAL else (),
        at_ns=one.began_ns,
        evidence=_timeout_quotes(one),
        not_proven="which of the two code paths is the wrong one",
    )


def _other_size(one: Hang) -> Iterator[Finding]:
    mine, typical = _pair(one)
    if mine is None or typical is None or not mine.numel_in or not typical.numel_in:
        return
    low, high = sorted((mine.numel_in, typical.numel_in))
    apart = high / low >= RATIO
    common = {
        "analyst": "watchdog",
        "first": _first(one.odd),
        "suspects": one.odd if len(one.odd) <= SEVERAL else (),
        "at_ns": one.began_ns,
        "evidence": _timeout_quotes(one),
        "because": _said(mine, typical, one),
    }
    if low <= TINY and apart and mine.op not in GATHERS:
        counting = mine.numel_in <= TINY
        yield Finding(mode="data-dependent-branch-desync", likelihood=0.5, not_proven="why it is there", **common)  # type: ignore[arg-type]
        if counting:
            yield Finding(mode="uneven-dataloader-desync", likelihood=0.52, not_proven="that its data had ended", **common)  # type: ignore[arg-type]
    elif apart or (mine.op in SHARDED and high != low):
        yield Finding(
            mode="data-dependent-branch-desync",
            likelihood=0.66 if mine.op in SHARDED else 0.55,
            not_proven="which branch of the program it took",
            **common,  # type: ignore[arg-type]
        )
    else:
        yield Finding(mode="collective-shape-mismatch", likelihood=0.68, not_proven="why the sizes differ", **common)  # type: ignore[arg-type]


def _other_place(case: Case, one: Hang) -> Finding:
    mine, typical = _pair(one)
    here = mine.place if mine else None
    there = typical.place if typical else None
    return Finding(
        mode="data-dependent-branch-desync",
        analyst="watchdog",
        likelihood=0.55,
        because=f"{_ranks(one.odd)} waits at {here or 'another line'}, {_ranks(one.waiting)} wait at {there or 'the same line'}.",
        first=_first(one.odd),
        suspects=one.odd if len(one.odd) <= SEVERAL else (),
        at_ns=one.began_ns,
        evidence=_timeout_quotes(one) or _evidence(case, one),
        not_proven="why the ranks took different ways",
    )


def _p2p(one: Hang) -> Iterator[Finding]:
    ops = Counter([item.op for item in one.timeouts] or one.calls)
    sends, receives = ops.get("SEND", 0), ops.get("RECV", 0)
    mode = "send-send-deadlock" if sends > 1 and not receives else "p2p-unpaired"
    yield Finding(
        mode=mode,
        analyst="watchdog",
        likelihood=0.6 if sends == 0 or receives == 0 else 0.45,
        because=f"{sends} sends and {receives} receives timed out: no partner came.",
        suspects=one.waiting if len(one.waiting) <= SEVERAL else (),
        at_ns=one.began_ns,
        evidence=tuple(quote(item.line, "cause") for item in one.timeouts[:SEVERAL])
        or ((quote(one.line, "cause"),) if one.line else ()),
        not_proven="which side lacks its partner",
    )


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


def _fingerprints(case: Case) -> Iterator[Finding]:
    """Reports of the debug wrapper: both sides say what they run."""
    events = case.of("fingerprint-mismatch")
    if not events:
        return
    runs: dict[int, dict[str, str]] = {}
    lines: dict[int, Line] = {}
    for event in events:
        for side in ("one", "other"):
            if (name := event.fields.get(side)) is not None:
                runs.setdefault(
                    int(name), {key: event.fields.get(f"{side}_{key}", "") for key in ("seq", "op", "shape", "dtype")}
                )
                lines.setdefault(int(name), event.line)
    branch = _graphs_differ(case, events, runs)
    for aspect, mode in (
        ("op", "collective-type-mismatch"),
        ("shape", "data-dependent-branch-desync" if branch else "collective-shape-mismatch"),
        ("dtype", "collective-dtype-mismatch"),
        ("seq", "collective-skipped"),
    ):
        values = {rank: run[aspect] for rank, run in runs.items()}
        if len(set(values.values())) > 1:
            odd = _odd(values, numeric=aspect in ("shape", "seq"))
            usual = next(value for rank, value in values.items() if rank not in odd)
            yield Finding(
                mode=mode,
                analyst="watchdog",
                likelihood=0.8,
                because=f"{_ranks(odd)} ran {runs[odd[0]]['op']} with {aspect} {values[odd[0]]}, "
                f"the others {runs[next(rank for rank in runs if rank not in odd)]['op']} with {aspect} {usual}.",
                first=_first(odd),
                suspects=odd if len(runs) > 2 else tuple(sorted(runs)),
                evidence=tuple(quote(event.line, "cause") for event in events[:2]),
                at_ns=events[0].t_ns,
                not_proven="which of the ranks is the wrong one" if len(runs) == 2 else "",
            )
            return


def _graphs_differ(case: Case, events: Sequence[Event], runs: dict[int, dict[str, str]]) -> bool:
    """Other sizes where the framework chooses what to send: parameters gathered for use, gradients reduced by backward."""
    if all(run["op"].upper().lstrip("_") in SHARDED for run in runs.values()):
        return True
    places = {(event.line.artifact.name, event.line.number) for event in events}
    reports = [one for one in raised(case) if (one.line.artifact.name, one.line.number) in places]
    return bool(reports) and all(any(frame.endswith(" in backward") for frame in one.frames) for one in reports)


def _odd(values: dict[int, str], *, numeric: bool) -> tuple[int, ...]:
    counts = Counter(values.values())
    (first, often), (second, less) = counts.most_common(2)
    if often > less:
        return tuple(sorted(rank for rank, value in values.items() if value != first))
    if numeric:
        lower = min((first, second), key=_size)
        return tuple(sorted(rank for rank, value in values.items() if value == lower))
    return tuple(sorted(rank for rank, value in values.items() if value != values[min(values)]))


def _size(shape: str) -> int:
    total = 1
    for part in shape.split(","):
        total *= int(part) if part.strip().isdigit() else 1
    return total


def _barriers(case: Case) -> Iterator[Finding]:
    events = case.of("monitored-barrier")
    if events:
        missing = tuple(sorted({int(one) for event in events for one in event.fields["missing"].split(",")}))
        yield Finding(
            mode="collective-skipped",
            analyst="watchdog",
            likelihood=0.7,
            because=f"The monitored barrier names {_ranks(missing)}: it did not come within {events[0].fields['timeout_ms']} ms.",
            first=_first(missing),
            suspects=missing if len(missing) <= SEVERAL else (),
            at_ns=events[0].t_ns,
            evidence=tuple(quote(event.line, "cause") for event in events[:2]),
            not_proven="what the missing rank did instead",
        )


def _reports(case: Case) -> Iterator[Finding]:
    """The desync report of TORCH_NCCL_DESYNC_DEBUG."""
    lagging = case.of("desync-lagging", "desync-never-joined")
    named: set[int] = set()
    for event in lagging:
        text = event.fields.get("lagging") or event.fields.get("lagging_list") or ""
        named |= {int(one) for one in text.split(",") if one.strip().isdigit()}
    if named:
        ranks = tuple(sorted(named))
        yield Finding(
            mode="collective-skipped",
            analyst="watchdog",
            likelihood=0.72,
            because=f"The desync report names {_ranks(ranks)}: it did not join the collective that the others are in.",
            first=_first(ranks),
            suspects=ranks if len(ranks) <= SEVERAL else (),
            at_ns=lagging[0].t_ns,
            evidence=tuple(quote(event.line, "cause") for event in lagging[:3]),
            not_proven="what the missing rank did instead",
        )


def _lengths(case: Case) -> Iterator[Finding]:
    """Gloo got a longer message than it has room for: the sizes of two ranks differ, and neither is known to be the wrong one."""
    events = case.of("gloo-length-mismatch")
    if events:
        fields = events[0].fields
        both = tuple(sorted(world(case)))
        yield Finding(
            mode="collective-shape-mismatch",
            analyst="watchdog",
            likelihood=0.85,
            because=f"A rank got a message of {fields['sent']} bytes where it expected {fields['expected']}: the ranks bring unlike sizes.",
            suspects=both if len(both) == 2 else (),
            host=events[0].host,
            at_ns=events[0].t_ns,
            evidence=tuple(quote(event.line, "cause") for event in events[:2]),
            not_proven="which of the sides brought the wrong size",
        )


def _stuck_watchdog(case: Case) -> Iterator[Finding]:
    """The heartbeat monitor of few ranks found their own watchdog thread stuck."""
    events = case.of("heartbeat-stuck")
    ranks = tuple(sorted({event.rank for event in events if event.rank is not None}))
    if ranks and len(ranks) * 2 <= max(len(world(case)), 2):
        yield Finding(
            mode="gil-deadlock-watchdog-stuck",
            analyst="watchdog",
            likelihood=0.74,
            because=f"The watchdog thread of {_ranks(ranks)} made no progress: a CUDA call or the GIL holds it.",
            first=_first(ranks),
            suspects=ranks if len(ranks) <= SEVERAL else (),
            at_ns=events[0].t_ns,
            evidence=tuple(quote(event.line, "cause") for event in events[:2]),
            not_proven="which lock or call it waits for",
        )


def _store(case: Case) -> Iterator[Finding]:
    """Starts that never came together: a group's first meeting in the store."""
    waiting = case.of("nccl-unique-id-missing")
    if waiting:
        yield from _unique_id(case, waiting)
    barrier = case.of("store-barrier-timeout")
    if not barrier:
        return
    stuck = tuple(sorted({int(event.fields["barrier_rank"]) for event in barrier}))
    size, joined = (int(barrier[0].fields[name]) for name in ("world", "joined"))
    key = barrier[0].fields["key"]
    evidence = tuple(quote(event.line, "cause") for event in barrier[:2])
    absent = tuple(rank for rank in range(size) if rank not in stuck)
    if joined > size:
        yield Finding(
            mode="restart-stale-store",
            analyst="watchdog",
            likelihood=0.75,
            because=f"{joined} workers counted themselves in where {size} belong: an earlier attempt used the same store.",
            first="all",
            evidence=evidence,
            at_ns=barrier[0].t_ns,
        )
    elif key.rpartition(":")[2] not in ("0", "1"):
        called = joined <= size // 2
        yield Finding(
            mode="new-group-misuse",
            analyst="watchdog",
            likelihood=0.65,
            because=f"A later group's start waited for all {size} ranks and {joined} came: not every rank called new_group.",
            first=None if called else _first(absent),
            suspects=stuck if called else absent if len(absent) <= SEVERAL else (),
            evidence=evidence,
            at_ns=barrier[0].t_ns,
        )
    else:
        yield Finding(
            mode="rendezvous-timeout",
            analyst="watchdog",
            likelihood=0.6,
            because=f"{joined} of {size} ranks came to the start.",
            first=absent[0] if len(absent) == 1 else None,
            suspects=absent if len(absent) <= SEVERAL and len(stuck) + joined >= size else (),
            evidence=evidence,
            at_ns=barrier[0].t_ns,
        )


def _unique_id(case: Case, waiting: Sequence[Event]) -> Iterator[Finding]:
    """A rank asks another one for the id of a communicator: that one never came to make it."""
    awaited = Counter(event.fields["awaited"] for event in waiting)
    keys = {event.fields["key"] for event in waiting}
    asked = {int(event.fields["waiting"]) for event in waiting}
    ranks = tuple(sorted(world(case) - asked)) if len(awaited) == 1 else ()
    if len(keys) == 1 and hang(case) is not None:
        return  # told as a hang
    yield Finding(
        mode="collective-skipped" if len(keys) == 1 else "cross-communicator-deadlock",
        analyst="watchdog",
        likelihood=0.55,
        because=f"{_ranks(tuple(sorted(asked)))} waited for the communicator's id from its first rank, which never came to make it.",
        first=ranks[0] if len(ranks) == 1 and len(keys) == 1 else None,
        suspects=ranks[:1] if len(ranks) == 1 and len(keys) == 1 else tuple(sorted(asked)) if len(keys) > 1 else (),
        evidence=tuple(quote(event.line, "cause") for event in waiting[:2]),
        at_ns=waiting[0].t_ns,
        not_proven="whether the first rank is stuck elsewhere or gone",
    )
