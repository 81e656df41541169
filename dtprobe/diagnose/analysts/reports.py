"""What libraries report of guilty ranks by themselves: debug wrappers, barriers, stores, heartbeat monitors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from dtprobe.diagnose.analysts.watchdog import SEVERAL, SHARDED, first_of, named
from dtprobe.diagnose.case import Case, Event, Finding, Line, quote
from dtprobe.diagnose.facts.hang import hang, world
from dtprobe.diagnose.facts.raised import raised

_BACKWARD = re.compile(r" in backward$")
_CHOOSES = re.compile(
    r"(?i)fsdp|fully_sharded|_unshard|deepspeed|zero3|partition\w*_param|distributed_fused|distrib_optimizer| in backward$"
)
"""Frames of libraries that gather parameters when they are used."""


def analyse(case: Case) -> Iterator[Finding]:
    """One finding for each kind of report."""
    yield from _fingerprints(case)
    yield from _barriers(case)
    yield from _reports(case)
    yield from _store(case)
    yield from _stuck_watchdog(case)
    yield from _lengths(case)


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
                analyst="reports",
                likelihood=0.8,
                because=f"{named(odd)} ran {runs[odd[0]]['op']} with {aspect} {values[odd[0]]}, "
                f"the others {runs[next(rank for rank in runs if rank not in odd)]['op']} with {aspect} {usual}.",
                first=first_of(odd),
                suspects=odd if len(runs) > 2 else tuple(sorted(runs)),
                evidence=tuple(quote(event.line, "cause") for event in events[:2]),
                at_ns=events[0].t_ns,
                not_proven="which of the ranks is the wrong one" if len(runs) == 2 else "",
            )
            return


def _graphs_differ(case: Case, events: Sequence[Event], runs: dict[int, dict[str, str]]) -> bool:
    """Other sizes where the framework chooses what to send: parameters gathered for use, gradients reduced by backward.

    A gather that the program itself calls sends what it was given: there other sizes are other shapes.
    """
    places = {(event.line.artifact.name, event.line.number) for event in events}
    reports = [one for one in raised(case) if (one.line.artifact.name, one.line.number) in places and one.frames]
    sharded = all(run["op"].upper().lstrip("_") in SHARDED for run in runs.values())
    inside = _CHOOSES if sharded else _BACKWARD
    return bool(reports) and all(any(inside.search(frame) for frame in one.frames) for one in reports)


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
            analyst="reports",
            likelihood=0.7,
            because=f"The monitored barrier names {named(missing)}: it did not come within {events[0].fields['timeout_ms']} ms.",
            first=first_of(missing),
            suspects=missing if len(missing) <= SEVERAL else (),
            at_ns=events[0].t_ns,
            evidence=tuple(quote(event.line, "cause") for event in events[:2]),
            not_proven="what the missing rank did instead",
        )


def _reports(case: Case) -> Iterator[Finding]:
    """The desync report of TORCH_NCCL_DESYNC_DEBUG."""
    events = case.of("desync-lagging", "desync-never-joined")
    lagging: set[int] = set()
    for event in events:
        text = event.fields.get("lagging") or event.fields.get("lagging_list") or ""
        lagging |= {int(one) for one in text.split(",") if one.strip().isdigit()}
    if lagging:
        ranks = tuple(sorted(lagging))
        yield Finding(
            mode="collective-skipped",
            analyst="reports",
            likelihood=0.72,
            because=f"The desync report names {named(ranks)}: it did not join the collective that the others are in.",
            first=first_of(ranks),
            suspects=ranks if len(ranks) <= SEVERAL else (),
            at_ns=events[0].t_ns,
            evidence=tuple(quote(event.line, "cause") for event in events[:3]),
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
            analyst="reports",
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
            analyst="reports",
            likelihood=0.74,
            because=f"The watchdog thread of {named(ranks)} made no progress: a CUDA call or the GIL holds it.",
            first=first_of(ranks),
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
            analyst="reports",
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
            analyst="reports",
            likelihood=0.65,
            because=f"A later group's start waited for all {size} ranks and {joined} came: not every rank called new_group.",
            first=None if called else first_of(absent),
            suspects=stuck if called else absent if len(absent) <= SEVERAL else (),
            evidence=evidence,
            at_ns=barrier[0].t_ns,
        )
    else:
        yield Finding(
            mode="rendezvous-timeout",
            analyst="reports",
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
        analyst="reports",
        likelihood=0.55,
        because=f"{named(tuple(sorted(asked)))} waited for the communicator's id from its first rank, which never came to make it.",
        first=ranks[0] if len(ranks) == 1 and len(keys) == 1 else None,
        suspects=ranks[:1] if len(ranks) == 1 and len(keys) == 1 else tuple(sorted(asked)) if len(keys) > 1 else (),
        evidence=tuple(quote(event.line, "cause") for event in waiting[:2]),
        at_ns=waiting[0].t_ns,
        not_proven="whether the first rank is stuck elsewhere or gone",
    )
