"""Findings of all analysts weighed: what several say of one mode joined, what another one explains put aside."""

from __future__ import annotations

import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from dtprobe.diagnose.case import Finding, First, Quote
from dtprobe.diagnose.diagnosis import HEALTHY

MOST = 0.98
"""No number of findings makes a mode surer than this."""
EXPLAINS = 0.5
"""A mode this likely explains what it brings about."""
SURE, LIKELY, CLOSE = 0.9, 0.7, 0.15
"""A cause that is only a guess does not explain what is all but sure, nor by its level what is clearly likelier than itself."""
EXCEPTION = "python-exception-one-rank"
BUSY = "rank0-long-work-timeout"
POINTING = frozenset(
    {
        EXCEPTION,
        "collective-skipped",
        "rank-lost",
        "rendezvous-timeout",
        "rank-killed",
        "sigsegv",
        "sigabrt",
        "nccl-cuda-error",
        "rank-stopped",
    }
)
"""Modes whose rank is also that of what brought them about."""
LATE_NS = 60_000_000_000
"""What came this much later is no cause: clocks of hosts and of the kernel differ by seconds."""
ALIKE = 100
"""Lines that are alike in so many characters, numbers left out, are of one kind."""
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
SAME_EVIDENCE = 0.5
"""How much a second analyst adds that points at the same lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """All findings of one mode together. `explained_by` are the modes that bring it about and were found too."""

    mode: str
    likelihood: float
    findings: tuple[Finding, ...]
    first: First
    suspects: tuple[int, ...]
    host: str | None
    explained_by: tuple[str, ...] = ()

    @property
    def best(self) -> Finding:
        """The finding that says most."""
        return self.findings[0]

    @property
    def at_ns(self) -> int | None:
        """When it happened, where any finding knows."""
        return min((one.at_ns for one in self.findings if one.at_ns is not None), default=None)

    def causes(self) -> set[tuple[str, int | None]]:
        """The places of its decisive lines."""
        return {(one.file, one.line) for finding in self.findings for one in finding.evidence if one.role == "cause"}


@cache
def levels() -> tuple[Mapping[str, int], int]:
    """The level of each mode that has one, and the level of all others; lower ones explain higher ones."""
    text = (files("dtprobe.diagnose") / "knowledge" / "levels.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    order = {name: number for number, name in enumerate(data["order"])}
    return {mode: order[name] for name, group in data["levels"].items() for mode in group}, order["specific"]


def level(mode: str) -> int:
    """How near the mode stands to a cause: the machine's own words before a process's, these before what its peers see."""
    known, usual = levels()
    return known.get(mode, usual)


def weigh(findings: Sequence[Finding], explains: Mapping[str, frozenset[str]]) -> list[Candidate]:
    """Every mode that was found, the likeliest that nothing else explains first."""
    by_mode: dict[str, list[Finding]] = defaultdict(list)
    for one in findings:
        by_mode[one.mode].append(one)
    joined = [_join(mode, group) for mode, group in by_mode.items()]
    judged = [_explained(one, joined, explains) for one in joined]
    return sorted(judged, key=lambda one: (bool(one.explained_by), -one.likelihood, level(one.mode), one.mode))


def _join(mode: str, findings: Sequence[Finding]) -> Candidate:
    """Noisy-or over analysts; one that shows no other line than a stronger one adds half."""
    ordered = tuple(sorted(findings, key=lambda one: -one.likelihood))
    unlikely, analysts, shown = 1.0, set[str](), set[tuple[str, int | None]]()
    for one in ordered:
        if one.analyst in analysts:
            continue
        analysts.add(one.analyst)
        places = {(quote.file, quote.line) for quote in one.evidence if quote.role == "cause"}
        weight = SAME_EVIDENCE if shown and places <= shown else 1.0
        shown |= places
        unlikely *= 1 - one.likelihood * weight
    first, suspects = _whom(ordered)
    return Candidate(
        mode=mode,
        likelihood=min(MOST, 1 - unlikely),
        findings=ordered,
        first=first,
        suspects=suspects,
        host=next((one.host for one in ordered if one.host), None),
    )


def _whom(findings: Sequence[Finding]) -> tuple[First, tuple[int, ...]]:
    """The rank that the findings agree on most, weighed by their likelihood; suspects of those that agree."""
    votes: dict[First, float] = defaultdict(float)
    one_rank = level(findings[0].mode) == level(BUSY) and any(isinstance(one.first, int) for one in findings)
    for one in findings:
        if one.first is not None and not (one_rank and one.first == "all"):
            votes[one.first] += one.likelihood
    if not votes:
        return None, next((one.suspects for one in findings if one.suspects), ())
    first = max(votes, key=lambda rank: votes[rank])
    agreeing = [one.suspects for one in findings if one.first == first and one.suspects]
    shared = [rank for rank in agreeing[0] if all(rank in other for other in agreeing)] if agreeing else []
    return first, tuple(shared) or (agreeing[0] if agreeing else ())


def _explained(one: Candidate, others: Sequence[Candidate], explains: Mapping[str, frozenset[str]]) -> Candidate:
    told = _told_by(one, others)
    causes = told or tuple(
        other.mode
        for other in sorted(others, key=lambda item: -item.likelihood)
        if other.mode != one.mode
        and other.likelihood >= EXPLAINS
        and not _told_by(other, others)
        and _brings_about(other, one, explains)
    )
    heirs = [other for other in others if one.mode != other.mode and other.mode in _brought(one, others, explains)]
    first, suspects = (one.first, one.suspects) if one.first is not None or one.suspects else _inherited(heirs)
    return replace(one, first=first, suspects=suspects, explained_by=causes)


def _told_by(one: Candidate, others: Sequence[Candidate]) -> tuple[str, ...]:
    """An exception is only the messenger where another finding reads more from its very line: it explains nothing by itself."""
    if one.mode != EXCEPTION:
        return ()
    return tuple(
        other.mode
        for other in others
        if other.mode != EXCEPTION and other.likelihood >= EXPLAINS and bool(other.causes() & one.causes())
    )


def _brought(one: Candidate, others: Sequence[Candidate], explains: Mapping[str, frozenset[str]]) -> set[str]:
    """The modes that this one explains, the exception that tells of it among them."""
    return {
        other.mode
        for other in others
        if one.mode in _told_by(other, others) or (other.mode != one.mode and _brings_about(one, other, explains))
    }


def _inherited(effects: Sequence[Candidate]) -> tuple[First, tuple[int, ...]]:
    """A cause that names no rank struck the one that its effects point at: who raised, who ended, whom the others wait for."""
    for one in sorted(effects, key=lambda item: (level(item.mode), -item.likelihood)):
        if one.mode in POINTING and (one.first == "all" or isinstance(one.first, int)):
            return one.first, one.suspects
    return None, ()


def _brings_about(cause: Candidate, effect: Candidate, explains: Mapping[str, frozenset[str]]) -> bool:
    if HEALTHY in (cause.mode, effect.mode) or _late(cause, effect):
        return False
    if effect.mode in explains.get(cause.mode, frozenset()):
        return effect.likelihood < SURE or cause.likelihood >= LIKELY
    if cause.mode in explains.get(effect.mode, frozenset()):
        return False
    likely = cause.likelihood >= LIKELY or cause.likelihood >= effect.likelihood - CLOSE
    return likely and level(cause.mode) < level(effect.mode)


def _late(cause: Candidate, effect: Candidate) -> bool:
    waiting = level("collective-skipped")
    if cause.at_ns is None or effect.at_ns is None or level(effect.mode) == waiting:
        return False
    return cause.at_ns > effect.at_ns + LATE_NS


def _various(quotes: Sequence[Quote]) -> list[Quote]:
    """Within a role one line of each kind before a second of the same: what ten ranks print alike is told by the first of them."""
    seen: Counter[tuple[str, str]] = Counter()
    places: set[tuple[str, int | None, str]] = set()
    numbered: list[tuple[str, int, Quote]] = []
    for one in quotes:
        place = (one.file, one.line, one.text if one.line is None else "")
        kind = (one.role, _NUMBERS.sub("#", one.text)[:ALIKE])
        numbered.append((one.role, seen[kind], one))
        seen[kind] += place not in places
        places.add(place)
    order = list(dict.fromkeys(role for role, _, _ in numbered))
    return [one for _, _, one in sorted(numbered, key=lambda item: (order.index(item[0]), item[1]))]


def evidence(chosen: Candidate, others: Sequence[Candidate], most: int) -> tuple[Quote, ...]:
    """The decisive lines first, then what they brought about: each line once, `most` in all."""
    quotes: list[Quote] = []
    for finding in chosen.findings:
        quotes += finding.evidence
    ordered = _various(sorted(quotes, key=lambda one: ("cause", "confirm", "effect").index(one.role)))
    for other in others:
        if chosen.mode in other.explained_by:
            ordered += [Quote(file=one.file, line=one.line, text=one.text, role="effect") for one in other.best.evidence[:2]]
    kept: dict[tuple[str, int | None, str], Quote] = {}
    for one in ordered:
        kept.setdefault((one.file, one.line, one.text if one.line is None else ""), one)
    return tuple(kept.values())[:most]
