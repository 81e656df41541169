"""What workers recorded of themselves, one JSON line an observation (`dtprobe.worker.record` and `attempt`, or the same in a log)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dtprobe.diagnose.case import Line
from dtprobe.readers.artifact import as_float, as_int, as_text, load_json


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One observation. `fields` are all of the line's."""

    kind: str
    rank: int | None
    pid: int | None
    t_ns: int
    fields: Mapping[str, Any]
    line: Line


@dataclass(frozen=True, kw_only=True)
class Try:
    """A try of one unit of work (`what`) on one rank. `ended` is None where it never ended: the rank hung or died in it.

    `error` and `text` are what it raised, empty where it raised nothing.
    """

    rank: int
    pid: int | None
    what: str
    begun_ns: int
    ended_ns: int | None
    error: str
    text: str
    fields: Mapping[str, Any]
    line: Line


def observations(lines: Iterable[Line]) -> Iterator[Observation]:
    """Every observation in these lines."""
    for line in lines:
        raw = line.raw.strip()
        if not raw.startswith('{"t_ns"') or '"kind"' not in raw:
            continue
        try:
            value = load_json(raw)
        except ValueError:
            continue
        t_ns, kind = as_int(value.get("t_ns")), as_text(value.get("kind"))
        if t_ns is None or kind is None:
            continue
        rank = as_int(value.get("rank"))
        yield Observation(
            kind=kind,
            rank=line.rank if rank is None else rank,
            pid=as_int(value.get("pid")),
            t_ns=line.artifact.placed_ns(t_ns),
            fields=value,
            line=line,
        )


def tries(seen: Iterable[Observation]) -> list[Try]:
    """Every try, in the order in which they began."""
    begun: dict[tuple[int, int | None, object], Observation] = {}
    ended: dict[tuple[int, int | None, object], Observation] = {}
    for one in seen:
        if one.rank is not None and one.kind in ("begun", "attempt"):
            key = one.rank, one.pid, one.fields.get("try")
            (begun if one.kind == "begun" else ended)[key] = one
    found = [_try(start, ended.get(key)) for key, start in begun.items()]
    found += [_try(end, end) for key, end in ended.items() if key not in begun]
    return sorted(found, key=lambda one: one.begun_ns)


def _try(start: Observation, end: Observation | None) -> Try:
    took = as_float(end.fields.get("took_s")) if end is not None else None
    begun = end.t_ns - int(took * 1e9) if end is start and end is not None and took is not None else start.t_ns
    last = end or start
    return Try(
        rank=start.rank if start.rank is not None else -1,
        pid=start.pid,
        what=as_text(start.fields.get("what")) or "?",
        begun_ns=begun,
        ended_ns=end.t_ns if end is not None else None,
        error=(as_text(end.fields.get("error")) or "") if end is not None else "",
        text=(as_text(end.fields.get("text")) or "") if end is not None else "",
        fields=last.fields,
        line=last.line,
    )
