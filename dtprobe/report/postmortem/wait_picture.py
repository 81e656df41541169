"""The wait-for graph as a picture: those who wait on the left (or above), those waited for on the right (or below)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from dtprobe.report.postmortem.drawing import Canvas, fit
from dtprobe.report.postmortem.waits import Graph, Node

BOX, HIGH = 156, 52
BETWEEN = 40
"""From one column to the next."""
APART, TIED = 12, 30
"""Between boxes of a column, and between those of a cycle, where the arrows need room."""
ARC = 26
"""Beside a cycle, for the arrows that pass by a box."""
MARGIN = 3
WIDE = 900

Seats = dict[int, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Block:
    """Nodes that are drawn one below the other: one alone, or a cycle."""

    nodes: tuple[int, ...]

    @property
    def tied(self) -> bool:
        return len(self.nodes) > 1

    @property
    def width(self) -> float:
        return BOX + (2 * ARC if len(self.nodes) > 2 else 0)

    @property
    def height(self) -> float:
        return len(self.nodes) * HIGH + (len(self.nodes) - 1) * TIED


def draw(graph: Graph, name: str = "waits") -> Markup:
    """The picture as an `<svg>` element."""
    blocks = [_Block(tuple(group)) for _, group in groupby(range(len(graph.nodes)), key=lambda place: graph.nodes[place].knot)]
    columns = [list(group) for _, group in groupby(blocks, key=lambda block: graph.nodes[block.nodes[0]].column)][::-1]
    _untangle(columns, graph)
    flat = sum(max(block.width for block in column) + BETWEEN for column in columns) <= WIDE
    seats, width, height = _flat(columns) if flat else _upright(columns)
    canvas = Canvas(width, height, name, "Who waited for whom", ". ".join(graph.sentences[:12]))
    canvas.heads("muted", "fault")
    for link in graph.links:
        ink = "fault" if link.cycle else "muted"
        path = _within(seats, link.source, link.target) if link.cycle else _across(seats[link.source], seats[link.target], flat)
        canvas.path(path, stroke=ink, head=ink, width=2 if link.cycle else 1.4)
    for place, node in enumerate(graph.nodes):
        _box(canvas, *seats[place], node)
    return canvas.markup()


def _untangle(columns: list[list[_Block]], graph: Graph) -> None:
    """Blocks stand near those that they wait for."""
    order: dict[int, float] = {}
    for column in reversed(columns):
        wanted = {}
        for block in column:
            after = [order[link.target] for link in graph.links if link.source in block.nodes and link.target in order]
            wanted[block] = sum(after) / len(after) if after else 0.0
        column.sort(key=lambda block: (wanted[block], block.nodes))
        for number, block in enumerate(column):
            order |= dict.fromkeys(block.nodes, number / len(column))


def _flat(columns: Sequence[Sequence[_Block]]) -> tuple[Seats, float, float]:
    seats: Seats = {}
    tall = max(sum(block.height + APART for block in column) - APART for column in columns)
    x = float(MARGIN)
    for column in columns:
        wide = max(block.width for block in column)
        y = MARGIN + (tall - sum(block.height + APART for block in column) + APART) / 2
        for block in column:
            _seat(seats, block, x + (wide - BOX) / 2, y)
            y += block.height + APART
        x += wide + BETWEEN
    return seats, x - BETWEEN + MARGIN, tall + 2 * MARGIN


def _upright(rows: Sequence[Sequence[_Block]]) -> tuple[Seats, float, float]:
    seats: Seats = {}
    wide = max(sum(block.width + APART for block in row) - APART for row in rows)
    y = float(MARGIN)
    for row in rows:
        x = MARGIN + (wide - sum(block.width + APART for block in row) + APART) / 2
        for block in row:
            _seat(seats, block, x + (block.width - BOX) / 2, y)
            x += block.width + APART
        y += max(block.height for block in row) + BETWEEN
    return seats, wide + 2 * MARGIN, y - BETWEEN + MARGIN


def _seat(seats: Seats, block: _Block, x: float, y: float) -> None:
    for number, place in enumerate(block.nodes):
        seats[place] = (x, y + number * (HIGH + TIED))


def _across(source: tuple[float, float], target: tuple[float, float], flat: bool) -> str:
    if flat:
        (x, y), (u, v) = (source[0] + BOX, source[1] + HIGH / 2), (target[0], target[1] + HIGH / 2)
        bend = (u - x) / 2
        return f"M{x:.1f} {y:.1f}C{x + bend:.1f} {y:.1f} {u - bend:.1f} {v:.1f} {u:.1f} {v:.1f}"
    (x, y), (u, v) = (source[0] + BOX / 2, source[1] + HIGH), (target[0] + BOX / 2, target[1])
    bend = (v - y) / 2
    return f"M{x:.1f} {y:.1f}C{x:.1f} {y + bend:.1f} {u:.1f} {v - bend:.1f} {u:.1f} {v:.1f}"


def _within(seats: Seats, source: int, target: int) -> str:
    """From one box of a cycle to another: straight to its neighbour, else around those between, on the right when going down."""
    (x, y), (_, v) = seats[source], seats[target]
    if abs(target - source) == 1:
        middle = x + BOX / 2 + (-20 if target > source else 20)
        return f"M{middle:.1f} {y + HIGH:.1f}V{v:.1f}" if target > source else f"M{middle:.1f} {y:.1f}V{v + HIGH:.1f}"
    side, out = (x + BOX, ARC) if target > source else (x, -ARC)
    y, v = y + HIGH / 2, v + HIGH / 2
    turn = 14 if v > y else -14
    return f"M{side:.1f} {y:.1f}q{out * 0.8:.1f} 0 {out * 0.8:.1f} {turn}V{v - turn:.1f}q0 {turn} {-out * 0.8:.1f} {turn}"


def _box(canvas: Canvas, x: float, y: float, node: Node) -> None:
    operations = "; ".join(f"{operation} of {group}" if group else operation for operation, group in node.doing)
    note = f"{node.name}: {f'waits in {operations}' if operations else 'waits for nobody'}{', suspect' if node.suspect else ''}"
    stroke = "fault" if node.suspect or node.cycle else "muted"
    canvas.box(x, y, BOX, HIGH, fill="surface", stroke=stroke, line=3 if node.suspect else 1.5, round_=7, note=note)
    room = BOX - 16
    name = node.name if len(node.ranks) <= 2 else f"{node.name} ({len(node.ranks):,})"
    shown = name if fit(name, room, 12) == name else f"{len(node.ranks):,} ranks"
    canvas.text(x + 8, y + 17, shown, bold=True, ink="fault" if node.suspect else "text", room=room)
    if not node.doing:
        canvas.text(x + 8, y + 32, "waits for nobody", size=11, ink="muted", room=room)
        canvas.text(x + 8, y + 45, "suspect" if node.suspect else "", size=11, ink="fault", room=room)
        return
    operation, group = node.doing[0]
    canvas.text(x + 8, y + 32, _short(operation), size=11, ink="muted", room=room)
    more = [f"of {group}"] if group else []
    more += [f"+{len(node.doing) - 1} more"] if len(node.doing) > 1 else []
    more += ["for one another"] if node.cycle and len(node.ranks) > 1 else []
    canvas.text(x + 8, y + 45, ", ".join(more[-2:]), size=11, ink="muted", room=room)


def _short(operation: str) -> str:
    """`all_reduce seq 13` as `all_reduce #13`."""
    return re.sub(r" seq (\d+)$", r" #\1", operation)
