"""Who waited for whom, as a graph that can be drawn: equal ranks as one node, cycles found, at most `NODES` nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dtprobe.diagnose.diagnosis import Waiting
from dtprobe.diagnose.graphs import strongly_connected
from dtprobe.report import words

APART = 12
"""Up to so many ranks each is a node of its own; of more, ranks that wait alike are one."""
NODES = 40
LONG = 8
"""A cycle of more nodes is drawn with its middle as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Ranks that wait alike. `doing` are the operations that they wait in, each with its group; none where they wait for nobody.

    `cycle` says that they wait for themselves in the end; nodes of one cycle share a `knot`. `column` counts from those who wait
    for nobody (0) to those at the other end.
    """

    ranks: tuple[int, ...]
    doing: tuple[tuple[str, str], ...]
    suspect: bool
    cycle: bool
    column: int
    knot: int

    @property
    def name(self) -> str:
        return words.ranks(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """`source` waits for `target`, both places in the list of nodes. `cycle` where it is a part of one."""

    source: int
    target: int
    cycle: bool


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The whole picture of so many `ranks`. Nodes of one cycle follow each other in its order."""

    ranks: int
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    cycles: tuple[tuple[int, ...], ...]
    sentences: tuple[str, ...]


def graph(waits: Sequence[Waiting], suspects: Iterable[int] = ()) -> Graph | None:
    """The graph of these waits, None where nobody waits for another. Linear in the number of waits."""
    edges: dict[int, set[int]] = defaultdict(set)
    doing: dict[int, dict[tuple[str, str], None]] = defaultdict(dict)
    for one in waits:
        if one.rank != one.awaits:
            edges[one.rank].add(one.awaits)
            doing[one.rank][words.clip(one.operation, 60), words.clip(one.group or "", 60)] = None
    if not edges:
        return None
    blamed = frozenset(suspects)
    ranks = sorted({*edges, *(target for targets in edges.values() for target in targets)})
    cycles = [tuple(found) for found in _components(ranks, edges) if len(found) > 1]
    parts: list[tuple[int, ...]] = [(rank,) for rank in ranks] if len(ranks) <= APART else _alike(ranks, edges, doing, blamed)
    parts = _fewer(_shortened(parts, edges), edges, blamed, cycles)
    return Graph(
        ranks=len(ranks),
        **_laid(parts, edges, doing, blamed),
        cycles=tuple(cycles),
        sentences=tuple(_sentences(waits)),
    )


def _operation(one: Waiting) -> str:
    return f"{words.clip(one.operation, 60)} of {words.clip(one.group, 60)}" if one.group else words.clip(one.operation, 60)


def _sentences(waits: Sequence[Waiting]) -> list[str]:
    """`ranks 0-2 wait in all_reduce of default_pg for rank 3`, those of most ranks first."""
    targets: dict[tuple[int, str], set[int]] = defaultdict(set)
    for one in waits:
        if one.rank != one.awaits:
            targets[one.rank, _operation(one)].add(one.awaits)
    sources: dict[tuple[str, frozenset[int]], list[int]] = defaultdict(list)
    everybody: dict[tuple[str, frozenset[int]], list[int]] = defaultdict(list)
    for (rank, operation), awaited in targets.items():
        sources[operation, frozenset(awaited)].append(rank)
        everybody[operation, frozenset((*awaited, rank))].append(rank)
    mutual = {
        (on, rank) for (on, members), waiting in everybody.items() if len(waiting) == len(members) > 2 for rank in waiting
    }
    found = [
        (len(waiting), f"{words.ranks(waiting)} wait in {operation} for one another")
        for (operation, members), waiting in everybody.items()
        if len(waiting) == len(members) > 2  # each waits for all the others
    ]
    for (operation, others), waiting in sources.items():
        if (operation, waiting[0]) not in mutual:
            verb = "wait" if len(waiting) > 1 else "waits"
            found.append((len(waiting), f"{words.ranks(waiting)} {verb} in {operation} for {words.ranks(others)}"))
    return [text for _, text in sorted(found, key=lambda one: -one[0])]


def _components(nodes: Iterable[int], edges: Mapping[int, Iterable[int]]) -> list[list[int]]:
    """Strongly connected parts, those waited for before those who wait; equal graphs give equal lists."""
    return list(strongly_connected(nodes, {node: sorted(targets) for node, targets in edges.items()}))


def _alike(
    ranks: Sequence[int],
    edges: Mapping[int, set[int]],
    doing: Mapping[int, Mapping[tuple[str, str], None]],
    blamed: frozenset[int],
) -> list[tuple[int, ...]]:
    """Ranks of which each waits for the same ones in the same operation and is awaited by the same, among themselves or not."""
    awaited_by: dict[int, set[int]] = defaultdict(set)
    for source, targets in edges.items():
        for target in targets:
            awaited_by[target].add(source)
    parts: list[tuple[int, ...]] = []
    left = list(ranks)
    for with_self in (False, True):
        groups: dict[object, list[int]] = defaultdict(list)
        for rank in left:
            own = frozenset((rank,)) if with_self else frozenset[int]()
            key = (
                frozenset(edges.get(rank, set()) | own),
                frozenset(awaited_by[rank] | own),
                tuple(doing.get(rank, ())),
                rank in blamed,
            )
            groups[key].append(rank)
        parts += [tuple(group) for group in groups.values() if with_self or len(group) > 1]
        left = [group[0] for group in groups.values() if len(group) == 1]
    return sorted(parts)


def _shortened(parts: list[tuple[int, ...]], edges: Mapping[int, set[int]]) -> list[tuple[int, ...]]:
    """Long cycles with their middle as one part."""
    made: list[tuple[int, ...]] = []
    for members in _components(range(len(parts)), _between(parts, edges)):
        cut = slice(LONG - 2, -1) if len(members) > LONG else slice(0, 0)
        middle = [rank for number in members[cut] for rank in parts[number]]
        del members[cut]
        made += [parts[number] for number in members] + ([tuple(sorted(middle))] if middle else [])
    return sorted(made)


def _between(parts: Sequence[tuple[int, ...]], edges: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """The waits among parts, by their places."""
    place = {rank: number for number, part in enumerate(parts) for rank in part}
    out: dict[int, set[int]] = defaultdict(set)
    for source, targets in edges.items():
        out[place[source]].update(place[target] for target in targets)
    for number, targets in out.items():
        targets.discard(number)
    return out


def _fewer(
    parts: list[tuple[int, ...]], edges: Mapping[int, set[int]], blamed: frozenset[int], cycles: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """At most NODES parts: those at fault, then cycles, then those nearest to them; all others become one."""
    if len(parts) <= NODES:
        return parts
    place = {rank: number for number, part in enumerate(parts) for rank in part}
    waiters: dict[int, list[int]] = defaultdict(list)
    for source, targets in edges.items():
        for target in targets:
            waiters[place[target]].append(place[source])
    ends = [number for number, part in enumerate(parts) if not any(edges.get(rank) for rank in part)]
    faulty = [number for number, part in enumerate(parts) if blamed.intersection(part)]
    in_cycles = [place[rank] for cycle in sorted(cycles, key=len) for rank in cycle]
    kept: dict[int, None] = {}
    queue = [*faulty, *in_cycles, *ends]
    for number in queue:
        if len(kept) == NODES - 1:
            break
        if number not in kept:
            kept[number] = None
            queue.extend(waiters[number])
    others = [rank for number, part in enumerate(parts) if number not in kept for rank in part]
    return sorted([*(parts[number] for number in kept), tuple(sorted(others))])


def _inward(part: tuple[int, ...], edges: Mapping[int, set[int]]) -> bool:
    members = frozenset(part)
    return any(not edges.get(rank, frozenset()).isdisjoint(members) for rank in part)


def _laid(
    parts: Sequence[tuple[int, ...]],
    edges: Mapping[int, set[int]],
    doing: Mapping[int, Mapping[tuple[str, str], None]],
    blamed: frozenset[int],
) -> dict[str, tuple]:
    out = _between(parts, edges)
    inside = {number for number, part in enumerate(parts) if _inward(part, edges)}
    components = _components(range(len(parts)), out)  # those waited for come first
    of = {number: index for index, members in enumerate(components) for number in members}
    column: dict[int, int] = {}
    for index, members in enumerate(components):
        after = [column[of[target]] for number in members for target in out.get(number, ()) if of[target] != index]
        column[index] = 1 + max(after) if after else 0
    order = [number for index in sorted(column, key=lambda index: column[index]) for number in components[index]]
    seat = {number: index for index, number in enumerate(order)}
    nodes = tuple(
        Node(
            ranks=parts[number],
            doing=tuple(dict.fromkeys(text for rank in parts[number] for text in doing.get(rank, ()))),
            suspect=bool(blamed.intersection(parts[number])),
            cycle=len(components[of[number]]) > 1 or number in inside,
            column=column[of[number]],
            knot=of[number],
        )
        for number in order
    )
    links = tuple(
        Link(source=seat[source], target=seat[target], cycle=of[source] == of[target])
        for source in order
        for target in sorted(out.get(source, ()), key=lambda number: seat[number])
    )
    return {"nodes": nodes, "links": links}
