"""Facts that are evidence only together, after `knowledge/joins.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from dtprobe.diagnose.case import Case, Event, Finding, Quote, quote
from dtprobe.diagnose.facts.about import in_order, whom

EACH = 2
"""So many lines are quoted of each need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A rule: one event of each of `needs`, none of `without`."""

    id: str
    mode: str
    likelihood: float
    needs: tuple[tuple[str, ...], ...]
    without: tuple[str, ...]
    same: str | None
    about: int
    scope: str
    because: str
    not_proven: str


@cache
def joins() -> tuple[Join, ...]:
    """All rules in the order of their file."""
    text = (files("dtprobe.diagnose") / "knowledge" / "joins.toml").read_text(encoding="utf-8")
    return tuple(
        Join(
            id=entry["id"],
            mode=entry["mode"],
            likelihood=float(entry["likelihood"]),
            needs=tuple(tuple(one) for one in entry["needs"]),
            without=tuple(entry.get("without", ())),
            same=entry.get("same"),
            about=int(entry.get("about", 0)),
            scope=entry["scope"],
            because=entry["because"],
            not_proven=entry.get("not_proven", ""),
        )
        for entry in tomllib.loads(text)["join"]
    )


def analyse(case: Case) -> Iterator[Finding]:
    """One finding a mode: the likeliest rule whose facts were all seen."""
    best: dict[str, Finding] = {}
    for join in joins():
        if join.without and case.of(*join.without):
            continue
        found = _met(join, case)
        if found and (join.mode not in best or best[join.mode].likelihood < join.likelihood):
            best[join.mode] = _finding(join, found, case)
    yield from best.values()


def _met(join: Join, case: Case) -> list[list[Event]]:
    """The events of each need; nothing where one of them has none."""
    found = [in_order(case.of(*names)) for names in join.needs]
    if not all(found):
        return []
    if join.same is None:
        return found
    values = [{_value(event, join.same) for event in events} for events in found[:2]]
    common = values[0] & values[1] - {None}
    kept = [[event for event in events if _value(event, join.same) in common] for events in found[:2]] + found[2:]
    return kept if all(kept) else []


def _value(event: Event, field: str) -> str | None:
    """The field to compare; of a path its last part, since listings often name a file from within its folder."""
    value = event.fields.get(field)
    return value.rstrip("/").rpartition("/")[2] if value else None


def _finding(join: Join, found: list[list[Event]], case: Case) -> Finding:
    first, suspects = whom(found[join.about], case, join.scope)
    quotes: list[Quote] = []
    for number, events in enumerate(found):
        quotes += [quote(event.line, "cause" if number == 0 else "confirm") for event in events[:EACH]]
    times = [event.t_ns for event in found[join.about] if event.t_ns is not None]
    return Finding(
        mode=join.mode,
        analyst="joined",
        likelihood=join.likelihood,
        because=join.because,
        first=first,
        suspects=suspects,
        host=next((event.host for event in found[join.about] if event.host), None),
        at_ns=min(times, default=None),
        evidence=tuple(quotes),
        not_proven=join.not_proven,
    )
