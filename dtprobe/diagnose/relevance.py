"""Whether what a line is evidence for concerns this job at all: trouble that it got over, and events of other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dtprobe.diagnose.case import Case, Finding
from dtprobe.diagnose.diagnosis import HEALTHY
from dtprobe.diagnose.facts.hang import hang, world
from dtprobe.diagnose.facts.raised import raised
from dtprobe.diagnose.facts.words import words
from dtprobe.diagnose.modes import modes
from dtprobe.diagnose.signatures import signatures
from dtprobe.diagnose.weigh import level

STARTING = frozenset({"bootstrap", "network", "config"})
"""Classes of trouble that a job may meet at its start and get over."""
SILENT = frozenset({"nested-launcher", "timeout-not-inherited", "duplicate-gpu", "clock-skew"})
"""These let a job end well and wrong."""
FIRST = 2
"""Collectives up to this number still belong to the start."""
WELL = 0.9
"""A finding of health this likely says that every rank ended well."""
OVERCOME = 0.3
"""What is left of the likelihood of trouble that the job got over."""
OF_OTHERS = 0.2
"""What is left where the kernel tells of processes that are none of the job's."""
OF_PROCESSES = frozenset({"host-oom-kill", "sigsegv"})
"""Modes in which the kernel names the process that it struck."""


def relevant(case: Case, findings: Sequence[Finding]) -> list[Finding]:
    """The findings, less likely where they do not concern what became of this job."""
    well = _communicated(case) or any(one.mode == HEALTHY and one.likelihood >= WELL for one in findings)
    strangers = {mode for mode in {one.mode for one in findings} & OF_PROCESSES if _of_strangers(case, mode)}
    return [_weighed(case, one, well=well, strange=one.mode in strangers) for one in findings]


def can_be_overcome(mode: str) -> bool:
    """Whether a job may get over this: trouble at the start that is neither silent nor the machine's."""
    return modes()[mode].group in STARTING and mode not in SILENT and level(mode) != level("ib-link-flap")


def _weighed(case: Case, one: Finding, *, well: bool, strange: bool) -> Finding:
    if strange and _by_kernel(case, one):
        return replace(one, likelihood=one.likelihood * OF_OTHERS, not_proven="that it struck a process of this job")
    if can_be_overcome(one.mode) and _overcome(case, one, well=well):
        return replace(one, likelihood=one.likelihood * OVERCOME)
    return one


def _communicated(case: Case) -> bool:
    """Whether the ranks had come together: collectives are recorded, or one timed out that was not the first."""
    if case.recording is not None:
        return True
    found = hang(case)
    return found is not None and any((one.seq or 0) > FIRST for one in found.timeouts)


def _overcome(case: Case, one: Finding, *, well: bool) -> bool:
    """The job trained or communicated afterwards, or every rank ended well; an exception at these very lines says otherwise."""
    ends = {(item.line.artifact.name, item.line.number) for item in raised(case)}
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
