"""What changes between versions, world sizes and launchers: verdicts and cures of the same scenario, side by side and dated.

All is read from the history, so that nights of other days and other machines count as well as the cells of one matrix. Of each combination
the newest night counts. Runs that came to no verdict (unsupported, inconclusive, error) say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dtprobe import stats
from dtprobe.matrix import releases
from dtprobe.matrix.cells import AXES, NONE
from dtprobe.store import history

SEEN = ("reproduced", "partly")
"""Verdicts by which the failure is there."""
SILENT = ("unsupported", "inconclusive", "error")
QUERY = """
    SELECT scenario, variant, coalesce(torch, 'none') AS torch, python, coalesce(world_size, 0) AS world_size,
           coalesce(launch, '') AS launcher, coalesce(night, '') AS night, verdict, coalesce(mitigation, 'none') AS cure,
           count(DISTINCT run) AS n, max(started_ns) AS last_ns
    FROM history WHERE python IS NOT NULL GROUP BY ALL
"""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One scenario in one combination: how often each verdict came, and each end of the cure."""

    scenario: str
    torch: str
    python: str
    world_size: int
    launcher: str
    night: str
    last_ns: int
    verdict: Mapping[str, int]
    cure: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A verdict (or the end of a cure) that is another on the two sides of a step along one axis.

    `low` and `high` are the last value before and the first after; `between` are releases there that were not run, so that the change may
    be in any of them. `only` is the one value that differs from all others, where it is one; then it is `high`. `where` says in which other
    circumstances, empty where in all that were compared. `released` is the day of `high`, where known.
    """

    scenario: str
    axis: str
    what: str
    before: str
    after: str
    low: str
    high: str
    between: tuple[str, ...]
    only: bool
    where: tuple[str, ...]
    released: str | None
    since: str | None
    """The day of the first release that may have brought it: of the first of `between`, else `released`."""
    words: str
    because: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def observed(out: Path, nights: Sequence[str] | None = None) -> list[Observed]:
    """What the history of `out` has, of these nights or of all: the newest night of each combination."""
    reading = history(out)
    try:
        rows = reading.sql(QUERY)
    finally:
        reading.close()
    groups: dict[tuple[Any, ...], dict[str, list[Any]]] = {}
    for row in rows.itertuples():
        if row.verdict in SILENT or (nights is not None and row.night not in nights):
            continue
        name = f"{row.scenario}:{row.variant}" if row.variant else row.scenario
        key = (name, releases.public(row.torch), row.python, int(row.world_size), row.launcher)
        groups.setdefault(key, {}).setdefault(row.night, []).append(row)
    found = []
    for (name, torch, python, world_size, launcher), by_night in groups.items():
        night, kept = max(by_night.items(), key=lambda item: max(row.last_ns for row in item[1]))
        verdict, cure = dict[str, int](), dict[str, int]()
        for row in kept:
            verdict[row.verdict] = verdict.get(row.verdict, 0) + int(row.n)
            cure[row.cure] = cure.get(row.cure, 0) + int(row.n)
        found.append(
            Observed(
                scenario=name,
                torch=torch,
                python=python,
                world_size=world_size,
                launcher=launcher,
                night=night,
                last_ns=max(int(row.last_ns) for row in kept),
                verdict=verdict,
                cure=cure,
            )
        )
    return found


def changes(rows: Iterable[Observed]) -> tuple[Change, ...]:
    """Every change along every axis, all else being equal; the same one in several circumstances once, with these named."""
    steps: dict[tuple[str, ...], list[tuple[str, Change]]] = {}
    compared: dict[tuple[str, ...], set[str]] = {}
    for axis in AXES:
        for (scenario, *_), line in _lines(rows, axis).items():
            place = _place(line[0], axis)
            for what in ("verdict", "cure"):
                values = [one for one in line if _main(getattr(one, what)) != "none"]
                for low, high, only in _steps(values, axis, what):
                    change = _change(scenario, axis, what, low, high, only)
                    key = (scenario, axis, what, change.before, change.after, change.low, change.high, str(only))
                    steps.setdefault(key, []).append((place, change))
                for one, two in pairwise(values):
                    compared.setdefault((scenario, axis, _value(one, axis), _value(two, axis)), set()).add(place)
    return tuple(_joined(key, found, compared) for key, found in sorted(steps.items()))


def _lines(rows: Iterable[Observed], axis: str) -> dict[tuple[Any, ...], list[Observed]]:
    """Runs of one scenario that differ along this axis alone, in its order."""
    others = [one for one in AXES if one != axis]
    found: dict[tuple[Any, ...], list[Observed]] = {}
    for row in rows:
        if not (axis == "torch" and row.torch == NONE):  # no torch is no version before the first
            found.setdefault((row.scenario, *(getattr(row, one) for one in others)), []).append(row)
    return {key: sorted(line, key=lambda one: _order(one, axis)) for key, line in found.items() if len(line) > 1}


def _order(row: Observed, axis: str) -> Any:
    value = getattr(row, axis)
    return releases.order(value) if axis in ("torch", "python") else value


def _value(row: Observed, axis: str) -> str:
    return str(getattr(row, axis))


def _steps(line: Sequence[Observed], axis: str, what: str) -> list[tuple[Observed, Observed, bool]]:
    """Neighbours that differ; of three and more the one that alone differs from all others, which agree, as one step."""
    if len(line) > 2:
        for place, one in enumerate(line):
            rest = [*line[:place], *line[place + 1 :]]
            agree = len({_main(getattr(other, what)) for other in rest}) == 1
            inside = axis == "launcher" or 0 < place < len(line) - 1
            if agree and inside and all(_differ(getattr(one, what), getattr(other, what)) for other in rest):
                return [(line[place - 1] if place else line[1], one, True)]
    return [(low, high, False) for low, high in pairwise(line) if _differ(getattr(low, what), getattr(high, what))]


def _main(counts: Mapping[str, int]) -> str:
    return max(counts, key=lambda name: (counts[name], name))


def _differ(one: Mapping[str, int], two: Mapping[str, int]) -> bool:
    """Whether two sets of runs say different things. Where either is of two minds by itself, only if that is more than chance."""
    first, second = _main(one), _main(two)
    if first == second:
        return False
    if len(one) == len(two) == 1:
        return True
    return stats.separated_counts(one[first], sum(one.values()), two.get(first, 0), sum(two.values()))


def _place(row: Observed, axis: str) -> str:
    said = {
        "torch": "without torch" if row.torch == NONE else f"torch {row.torch}",
        "python": f"Python {row.python}",
        "world_size": f"{row.world_size} ranks",
        "launcher": row.launcher or "an unknown launcher",
    }
    return ", ".join(text for name, text in said.items() if name != axis)


def _change(scenario: str, axis: str, what: str, low: Observed, high: Observed, only: bool) -> Change:
    before, after = getattr(low, what), getattr(high, what)
    first, second = _value(low, axis), _value(high, axis)
    versions = axis in ("torch", "python")
    missing = releases.between(axis, first, second) if versions and not only else ()
    released = releases.released(axis, second) if versions else None
    earliest = releases.released(axis, missing[0]) if missing else released
    day = released.isoformat() if released else None
    since = earliest.isoformat() if earliest else None
    verb = _verb(what, _main(before), _main(after))
    return Change(
        scenario=scenario,
        axis=axis,
        what=what,
        before=_main(before),
        after=_main(after),
        low=first,
        high=second,
        between=missing,
        only=only,
        where=(),
        released=day,
        since=since,
        words=f"{verb} {_step(axis, first, second, missing, only, since, day)}",
        because=f"{_counts(before)} with {_named(axis, first)}, {_counts(after)} with {_named(axis, second)}",
    )


def _verb(what: str, before: str, after: str) -> str:
    if what == "cure":
        return "the cure holds" if after == "held" else "the cure fails"
    if (before in SEEN) == (after in SEEN):
        return f"{after} instead of {before}"
    return "appears" if after in SEEN else "fixed"


def _step(axis: str, low: str, high: str, missing: Sequence[str], only: bool, since: str | None, released: str | None) -> str:
    if only or axis == "launcher":
        return f"only with {_named(axis, high)}" if only else f"with {_named(axis, high)}, not with {_named(axis, low)}"
    if axis == "world_size":
        return f"from {high} ranks on (not with {low})"
    if axis == "python":
        gap = f" ({', '.join(missing)} not run)" if missing else ""
        return f"with {_named(axis, high)}, not with {_named(axis, low)}{gap}"
    if missing:
        days = f", released {since} to {released}" if since and released else ""
        return f"between {_named(axis, low)} and {high} ({', '.join(missing)} not run{days})"
    return f"in {_named(axis, high)}" + (f" (released {released})" if released else " (day of release unknown)")


def _named(axis: str, value: str) -> str:
    form = {"torch": "torch {}", "python": "Python {}", "world_size": "{} ranks", "launcher": "launcher {}"}
    return form[axis].format(value or "unknown")


def _counts(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return " and ".join(f"{name} in {n} of {total}" for name, n in sorted(counts.items(), key=lambda item: -item[1]))


def _joined(key: tuple[str, ...], found: Sequence[tuple[str, Change]], compared: Mapping[tuple[str, ...], set[str]]) -> Change:
    scenario, axis, _, _, _, low, high, _ = key
    places = sorted(place for place, _ in found)
    everywhere = compared.get((scenario, axis, low, high), set())
    where = tuple(places) if set(places) < everywhere else ()
    change = found[0][1]
    words = change.words + (f"; only {' and '.join(where)}" if where else "")
    return Change(**{**asdict(change), "where": where, "words": words})
