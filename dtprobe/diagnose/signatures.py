"""Signatures: what single lines are evidence for. They are data, in `knowledge/signatures/*.toml`, with their own examples as tests."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ahocorasick_rs import AhoCorasick

from dtprobe.diagnose.case import Event, Line

LONGEST = 8192
"""A line is looked at up to this many characters: what software prints about a failure stands at its start."""
SCOPES = ("rank", "first", "alike", "all", "host", "store", "peer", "nobody")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A kind of line. It is looked for only in lines that hold one of its `anchors`, plain pieces of text.

    `mode` is the failure mode that the line is evidence for, with `likelihood` that this is the job's first failure if nothing
    else were known; without a mode the line only tells something (`context`) that analysts join. `role`: cause or effect.

    `scope` says whom such lines are about: `rank` (the rank named, else the one that printed it; all ranks where every one of them
    shows it), `first` (only ever the first that showed it), `alike` (all ranks as soon as two show it, or where none can be named),
    `all` (always the whole job), `host` (the ranks of the host named, first of them foremost), `store` (rank 0, which serves the
    store), `peer` (the one rank that did not show it), `nobody` (no rank can be named).

    `fields` of the patterns with fixed meanings name whom the line is about: `rank`, `local` (a local rank), `host`, `pid`, `gpu`
    (a PCI bus id).
    """

    id: str
    patterns: tuple[re.Pattern[str], ...]
    anchors: tuple[str, ...]
    mode: str | None
    likelihood: float
    role: str
    scope: str
    not_proven: str
    examples: tuple[str, ...]
    counterexamples: tuple[str, ...]

    def event(self, line: Line) -> Event | None:
        """The event that this line is, or None."""
        text = line.text[:LONGEST]
        return self.seen_in(line, text) if any(anchor in text for anchor in self.anchors) else None

    def seen_in(self, line: Line, text: str) -> Event | None:
        """The event that this line is, its text known to hold an anchor; or None."""
        for pattern in self.patterns:
            if match := pattern.search(text):
                break
        else:
            return None
        fields = {name: value for name, value in match.groupdict().items() if value is not None}
        rank = fields.get("rank")
        return Event(
            signature=self.id,
            line=line,
            fields=fields,
            rank=int(rank) if rank and rank.isdigit() else line.rank,
            host=fields.get("host") or line.host,
            t_ns=line.t_ns,
        )


@cache
def signatures() -> dict[str, Signature]:
    """All signatures by id, in the order of their files."""
    folder = files("dtprobe.diagnose") / "knowledge" / "signatures"
    found: dict[str, Signature] = {}
    for file in sorted(folder.iterdir(), key=lambda one: one.name):
        if file.name.endswith(".toml"):
            for entry in tomllib.loads(file.read_text(encoding="utf-8")).get("signature", []):
                one = _signature(entry)
                if one.id in found:
                    raise ValueError(f"{file.name}: the signature {one.id} exists already")
                if one.scope not in SCOPES:
                    raise ValueError(f"{file.name}: {one.id} has the scope {one.scope}: write one of {', '.join(SCOPES)}")
                found[one.id] = one
    return found


def _signature(entry: dict[str, Any]) -> Signature:
    return Signature(
        id=entry["id"],
        patterns=tuple(re.compile(one) for one in entry.get("patterns") or [entry["pattern"]]),
        anchors=tuple(entry["anchors"]),
        mode=entry.get("mode"),
        likelihood=float(entry.get("likelihood", 0.0)),
        role=entry.get("role", "cause" if entry.get("mode") else "confirm"),
        scope=entry.get("scope", "rank"),
        not_proven=entry.get("not_proven", ""),
        examples=tuple(entry["examples"]),
        counterexamples=tuple(entry.get("counterexamples", ())),
    )


@cache
def anchors() -> tuple[str, ...]:
    """Every plain piece of text that makes a line worth a look, each once: what holds none of them is no event."""
    return tuple(dict.fromkeys(anchor for one in signatures().values() for anchor in one.anchors))


@dataclass(frozen=True, slots=True)
class _Index:
    """All anchors in one automaton, and which signatures ask for each."""

    automaton: AhoCorasick
    of_anchor: tuple[tuple[int, ...], ...]
    known: Sequence[Signature]

    def events(self, line: Line, text: str, hits: Iterable[tuple[int, int, int]]) -> Iterator[Event]:
        for number in sorted({number for hit in hits for number in self.of_anchor[hit[0]]}):
            event = self.known[number].seen_in(line, text)
            if event is not None:
                yield event


@cache
def _index() -> _Index:
    known = tuple(signatures().values())
    asked: dict[str, list[int]] = {anchor: [] for anchor in anchors()}
    for number, one in enumerate(known):
        for anchor in dict.fromkeys(one.anchors):
            asked[anchor].append(number)
    return _Index(AhoCorasick(list(asked)), tuple(tuple(one) for one in asked.values()), known)


def events_of(lines: Iterable[Line]) -> Iterator[Event]:
    """Every event in these lines; one line may be several, in the order of the signatures."""
    index = _index()
    find = index.automaton.find_matches_as_indexes
    for line in lines:
        text = line.text if len(line.text) <= LONGEST else line.text[:LONGEST]
        if hits := find(text, overlapping=True):
            yield from index.events(line, text, hits)
