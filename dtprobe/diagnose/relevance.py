"""Whether what a line is evidence for concerns this job at all: trouble that it got over, and events of other processes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from dtprobe.diagnose import seen
from dtprobe.diagnose.case import Case, Finding
from dtprobe.diagnose.diagnosis import HEALTHY
from dtprobe.diagnose.facts.agents import account
from dtprobe.diagnose.facts.hang import hang, world
from dtprobe.diagnose.facts.outcome import handled, outcome
from dtprobe.diagnose.facts.raised import raised
from dtprobe.diagnose.facts.words import SPOKEN, words
from dtprobe.diagnose.modes import modes
from dtprobe.diagnose.signatures import signatures
from dtprobe.diagnose.weigh import EXCEPTION, level

STARTING = frozenset({"bootstrap", "network", "config"})
"""Classes of trouble that a job may meet at its start and get over."""
SILENT = frozenset(
    {
        "nested-launcher",
        "timeout-not-inherited",
        "duplicate-gpu",
        "clock-skew",
        "reduce-op-mismatch",
        "broadcast-root-mismatch",
        "group-order-swap",
        "dropped-isend",
        "gloo-thread-leak",
        "rdma-contention",
        "packet-loss",
        "nfs-stale-view",
        "file-claim-race",
        "filestore-stale-read",
        "filestore-torn-record",
    }
)
"""These let a job end well and wrong."""
FIRST = 2
"""Collectives up to this number still belong to the start."""
ENDED_WELL = 0.25
"""What is left of the likelihood of a failure where the job ended well."""
LASTING = frozenset({"numerics", "straggler", "framework", "shape-mismatch"})
"""Classes of failures with which a job may end: slow, or with wrong results."""
KERNEL = "kernel-log"
BEFORE_NS, ZONES_NS, OVERCOME_LATER = 1_800_000_000_000, 15 * 3_600_000_000_000, 0.55
"""The kernel's words this long before or after the job are not about it; clocks told without their zones may be so far apart."""
OVERCOME = 0.3
"""What is left of the likelihood of trouble that the job got over."""
OF_OTHERS = 0.2
"""What is left where the kernel tells of processes that are none of the job's."""
OF_PROCESSES = frozenset({"host-oom-kill", "sigsegv"})
"""Modes in which the kernel names the process that it struck."""

RAISED = frozenset({EXCEPTION, "cuda-oom-one-rank"})
"""What a program may catch, and go on with less."""
_CAUGHT = re.compile(
    r"(?i)\b(?:caught|recovered|retry(?:ing)?|halv(?:e|ing)|trying|fall(?:ing)? back|reduc(?:e|ing) (?:the )?(?:micro[- ]?)?batch|skipp(?:ed|ing))\b"
)


def relevant(case: Case, findings: Sequence[Finding]) -> list[Finding]:
    """The findings, less likely where they do not concern what became of this job."""
    ended = outcome(case)
    well = _communicated(case) or (ended is not None and ended.told)
    strangers = {mode for mode in {one.mode for one in findings} & OF_PROCESSES if _of_strangers(case, mode)}
    weighed = [_weighed(case, one, well=well, strange=one.mode in strangers) for one in findings]
    if ended is not None and ended.told and case.recording is None:
        weighed = [replace(one, likelihood=one.likelihood * ENDED_WELL) if _ends_a_job(one.mode) else one for one in weighed]
    if ended is not None and not ended.told and handled(case) >= {one for one in raised(case) if not one.ignored}:
        weighed = [replace(one, likelihood=one.likelihood * OF_OTHERS) if one.mode == EXCEPTION else one for one in weighed]
    return [_timely(case, one) for one in weighed]


def _ends_a_job(mode: str) -> bool:
    """Whether a job with this failure cannot end well, but for having got over it."""
    return mode not in SILENT | {HEALTHY} and modes()[mode].group not in LASTING


def _timely(case: Case, one: Finding) -> Finding:
    """Less likely where the kernel told of it long before the job began or after it was over."""
    window, causes = _window(case), [item for item in one.evidence if item.role == "cause"]
    if window is None or not causes:
        return one
    kernel = {
        (event.line.artifact.name, event.line.number): event.line.t_ns
        for event in case.events
        if event.line.artifact.kind == KERNEL
    }
    times = [kernel.get((item.file, item.line or 0)) for item in causes]
    if not all(time is not None and not window[0] - BEFORE_NS <= time <= window[1] + BEFORE_NS for time in times):
        return one
    far = all(time is not None and not window[0] - ZONES_NS <= time <= window[1] + ZONES_NS for time in times)
    return replace(
        one,
        likelihood=one.likelihood * (OF_OTHERS if far else OVERCOME_LATER),
        not_proven="that it met this job, which ran at another time",
    )


@lru_cache(maxsize=2)
def _window(case: Case) -> tuple[int, int] | None:
    """From the first to the last time that lines of the job itself tell; None where they tell none."""
    times = [line.t_ns for line in case.lines if line.t_ns is not None and line.artifact.kind in SPOKEN | {"nccl-log"}]
    return (min(times), max(times)) if len(times) > 1 else None


def can_be_overcome(mode: str) -> bool:
    """Whether a job may get over this: trouble at the start that is neither silent nor the machine's."""
    return modes()[mode].group in STARTING and mode not in SILENT and level(mode) != level("ib-link-flap")


def _weighed(case: Case, one: Finding, *, well: bool, strange: bool) -> Finding:
    if strange and _by_kernel(case, one):
        return replace(one, likelihood=one.likelihood * OF_OTHERS, not_proven="that it struck a process of this job")
    if one.mode == "rank-lost" and (told := account(case)) is not None and one.first in told.alive:
        return replace(one, likelihood=one.likelihood * OF_OTHERS, not_proven="that it was gone: its launcher found it running")
    if one.mode in RAISED and _caught(case, one):
        return replace(one, likelihood=one.likelihood * OVERCOME)
    if can_be_overcome(one.mode) and _overcome(case, one, well=well):
        return replace(one, likelihood=one.likelihood * OVERCOME)
    return one


def _caught(case: Case, one: Finding) -> bool:
    """Every decisive line is itself told to have been caught, and its file tells of steps below it."""
    causes = [item for item in one.evidence if item.role == "cause"]
    ends = {(item.line.artifact.name, item.line.number) for item in raised(case)}
    return bool(causes) and all(
        (item.file, item.line) not in ends
        and _CAUGHT.search(item.text) is not None
        and item.line is not None
        and words(case).trained_after(item.file, item.line)
        for item in causes
    )


def _communicated(case: Case) -> bool:
    """Whether the ranks had come together: collectives are recorded, or one timed out that was not the first."""
    if case.recording is not None:
        return True
    found = hang(case)
    return found is not None and any((one.seq or 0) > FIRST for one in found.timeouts)


def _overcome(case: Case, one: Finding, *, well: bool) -> bool:
    """The job trained or communicated afterwards, or every rank ended well; an exception at these very lines says otherwise."""
    ends = {(item.line.artifact.name, item.line.number) for item in raised(case)}
    ends |= {(item.line.artifact.name, item.line.number) for item in seen.of(case).tries if item.error}
    places = [(item.file, item.line) for item in one.evidence if item.role == "cause"]
    if not places or any(place in ends for place in places):
        return False
    return well or all(words(case).trained_after(*place) for place in places)


def _of_strangers(case: Case, mode: str) -> bool:
    """Every rank's process is known, and the kernel names only others, of which the job's own lines say nothing."""
    own = {seat.pid for seat in case.who.seats if seat.pid is not None}
    if not own or {seat.rank for seat in case.who.seats if seat.pid is not None} != world(case):
        return False
    known = signatures()
    told = [event for event in case.events if known[event.signature].mode == mode and "pid" in event.fields]
    named = {int(event.fields["pid"]) for event in told if event.fields["pid"].isdigit()}
    if not named or named & own:
        return False
    words_for = [f"pid {pid}" for pid in named] + [f"pid: {pid}" for pid in named] + [f"pid={pid}" for pid in named]
    places = {(event.line.artifact.name, event.line.number) for event in told}
    lines = (line for line in case.lines if line.artifact.kind != "kernel-log")
    return not any(
        any(word in line.text for word in words_for) for line in lines if (line.artifact.name, line.number) not in places
    )


def _by_kernel(case: Case, one: Finding) -> bool:
    """Whether the evidence is the kernel's: its decisive lines name processes by their ids."""
    known = signatures()
    named = {
        (event.line.artifact.name, event.line.number)
        for event in case.events
        if known[event.signature].mode == one.mode and event.line.artifact.kind == "kernel-log"
    }
    return bool(named) and all((item.file, item.line) in named for item in one.evidence if item.role == "cause")
