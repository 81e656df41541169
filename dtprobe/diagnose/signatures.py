"""Signatures: what single lines are evidence for. They are data, in `knowledge/signatures/*.toml`, with their own examples as tests."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from dtprobe.diagnose.case import Event, Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A kind of line. It is looked for only in lines that hold one of its `anchors`, plain pieces of text.

    `mode` is the failure mode that the line is evidence for, with `likelihood` that this is the job's first failure if nothing
    else were known; without a mode the line only tells something (`context`) that analysts join. `role`: cause or effect. `fields` of the pattern with fixed
    meanings: `rank`, `host`, `pid`, `gpu` (a PCI bus id).
    """

    id: str
    pattern: re.Pattern[str]
    anchors: tuple[str, ...]
    mode: str | None
    likelihood: float
    role: str
    not_proven: str
    examples: tuple[str, ...]
    counterexamples: tuple[str, ...]

    def event(self, line: Line) -> Event | None:
        """The event that this line is, or None."""
        if not any(anchor in line.text for anchor in self.anchors):
            return None
        match = self.pattern.search(line.text)
        if match is None:
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
                found[one.id] = one
    return found


def _signature(entry: dict[str, Any]) -> Signature:
    return Signature(
        id=entry["id"],
        pattern=re.compile(entry["pattern"]),
        anchors=tuple(entry["anchors"]),
        mode=entry.get("mode"),
        likelihood=float(entry.get("likelihood", 0.0)),
        role=entry.get("role", "confirm"),
        not_proven=entry.get("not_proven", ""),
        examples=tuple(entry["examples"]),
        counterexamples=tuple(entry.get("counterexamples", ())),
    )


def events_of(lines: Iterable[Line]) -> Iterator[Event]:
    """Every event in these lines; one line may be several."""
    known = tuple(signatures().values())
    for line in lines:
        for signature in known:
            event = signature.event(line)
            if event is not None:
                yield event
