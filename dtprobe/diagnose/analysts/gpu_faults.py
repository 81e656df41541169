"""Illegal accesses that the driver reports (Xid 13, 31): a fault that stays with one device, or a kernel that is wrong everywhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from dtprobe.diagnose.case import Case, Event, Finding, First, quote
from dtprobe.diagnose.facts.about import device_rank, in_order, rank_of
from dtprobe.diagnose.who import bus_key

SHOWN = 6
APART_NS = 120_000_000_000
"""Faults of one process come in one burst; faults this far apart are of different ones."""


def analyse(case: Case) -> Iterator[Finding]:
    """At most one finding."""
    faults = [event for event in in_order(case.of("xid-illegal-access")) if "Misaligned" not in event.fields.get("rest", "")]
    if not faults:
        return
    by_gpu: dict[tuple[str | None, str], list[Event]] = defaultdict(list)
    for event in faults:
        by_gpu[event.host, bus_key(event.fields["gpu"])].append(event)
    if len(by_gpu) > 1:
        yield _everywhere(case, list(by_gpu.values()))
        return
    events = next(iter(by_gpu.values()))
    first = rank_of(events[-1], case)
    first = device_rank(case, events[-1].host) if first is None else first
    processes = {event.fields["pid"] for event in events if "pid" in event.fields}
    if len(processes) > 1 or _spread(events) > APART_NS:
        yield _finding(
            "gpu-mmu-fault-faulty-device",
            0.92,
            events,
            first,
            f"One GPU ({events[0].fields['gpu']}) faults again and again, under {max(len(processes), 2)} different processes.",
            "that the code is right: another GPU must run it without the fault",
        )
        return
    yield _finding(
        "gpu-illegal-address-kernel-bug",
        0.8,
        events,
        first,
        f"A kernel on one GPU ({events[0].fields['gpu']}) made an illegal access.",
        "that the device is sound: one fault does not tell a bug from a defect",
    )


def _everywhere(case: Case, groups: Sequence[Sequence[Event]]) -> Finding:
    leading = [group[0] for group in groups]
    ranks = {rank_of(event, case) for event in leading}
    together = max(_spread(leading), 0) <= APART_NS
    return _finding(
        "gpu-illegal-address-kernel-bug",
        0.92 if together else 0.8,
        [*in_order(leading), *(event for group in groups for event in group[1:])],
        "all",
        f"{len(groups)} GPUs report illegal accesses{' at one time' if together else ''}: the kernel is wrong, not a device.",
        "which kernel it is: compute-sanitizer tells",
        () if None in ranks else tuple(sorted(rank for rank in ranks if rank is not None))[:0],
    )


def _spread(events: Sequence[Event]) -> int:
    times = [event.t_ns for event in events if event.t_ns is not None]
    return max(times) - min(times) if times else 0


def _finding(
    mode: str,
    likelihood: float,
    events: Sequence[Event],
    first: First,
    because: str,
    not_proven: str,
    suspects: tuple[int, ...] = (),
) -> Finding:
    return Finding(
        mode=mode,
        analyst="gpu-faults",
        likelihood=likelihood,
        because=because,
        first=first,
        suspects=(first,) if isinstance(first, int) else suspects,
        host=events[0].host,
        at_ns=events[0].t_ns,
        evidence=tuple(quote(event.line, "cause") for event in events[:SHOWN]),
        not_proven=not_proven,
    )
