"""Whether all ranks mean the same members by a group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dtprobe.diagnose.analysts.collectives.recording import Recording
from dtprobe.readers.flight_columns import Lane


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """Of the group `name` the ranks hold different views; or `without` are counted among its members and do not know it."""

    name: str
    views: dict[tuple[int, ...], tuple[int, ...]]
    without: tuple[int, ...] = ()


def disagreements(recording: Recording) -> Iterator[Disagreement]:
    """Groups of one name whose member lists overlap and differ, and groups that some of their members do not have."""
    views: dict[str, dict[tuple[int, ...], list[int]]] = {}
    for rank, calls in recording.ranks.items():
        for name, members in calls.groups.items():
            if members is not None:
                views.setdefault(name, {}).setdefault(tuple(sorted(members)), []).append(rank)
    for name, held in views.items():
        seen: set[int] = set()
        overlap = False
        for members in held:
            overlap = overlap or not seen.isdisjoint(members)
            seen.update(members)
        if overlap:
            yield Disagreement(name=name, views={members: tuple(ranks) for members, ranks in held.items()})
            continue
        for members, ranks in held.items():
            without = tuple(one for one in members if one in recording.ranks and _lacks(recording, one, name))
            used = any(Lane(name) in recording.ranks[one].columns for one in ranks)
            if without and used:
                yield Disagreement(name=name, views={members: tuple(ranks)}, without=without)


def _lacks(recording: Recording, rank: int, name: str) -> bool:
    """Whether the rank's dump lists its groups, and not this one."""
    calls = recording.ranks[rank]
    return any(members is not None for members in calls.groups.values()) and name not in calls.groups and not calls.cut
