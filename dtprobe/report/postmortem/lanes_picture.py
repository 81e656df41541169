"""The timeline as a picture: a lane a rank, its moments by number, how far each may be off, and the silences that were cut."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from markupsafe import Markup

from dtprobe.diagnose.diagnosis import Operation
from dtprobe.report.postmortem.drawing import Canvas, polyline
from dtprobe.report.postmortem.moments import SECOND, Lane, Mark, Stretch, Timeline, duration, since

WIDE, NARROW = 900, 330
LANE = 30
HEAD = 20
CUT = 46
"""The room of a silence that was cut."""
OPEN = 30
"""How far the bar of what never ended goes beyond all else."""
TICK = 76
NEAR = 15
"""Marks nearer than this on a lane are one."""
_INKS = {"cause": "fault", "confirm": "control", "effect": "muted", "other": "muted"}


class _Axis:
    """UTC nanoseconds to pixels: each stretch gets room by its length, each at least a little."""

    def __init__(self, stretches: Sequence[Stretch], left: float, right: float) -> None:
        self.stretches = stretches
        room = right - left - CUT * (len(stretches) - 1)
        lengths = [one.end_ns - one.begin_ns for one in stretches]
        least = min(24.0, room / len(stretches))
        spare = room - least * len(stretches)
        total = sum(lengths)
        self.sides: list[tuple[float, float]] = []
        x = left
        for length in lengths:
            wide = least + (spare * length / total if total else spare / len(stretches))
            self.sides.append((x, x + wide))
            x += wide + CUT

    def __call__(self, t_ns: float) -> float:
        at = max(0, bisect_right([one.begin_ns for one in self.stretches], t_ns) - 1)
        one, (left, right) = self.stretches[at], self.sides[at]
        if one.end_ns == one.begin_ns:
            return (left + right) / 2
        return min(max(left, left + (right - left) * (t_ns - one.begin_ns) / (one.end_ns - one.begin_ns)), right)


def draw(data: Timeline, width: float, name: str) -> Markup:
    """The picture as an `<svg>` element."""
    hosts = _hosts(data.lanes)
    label = 128.0 if width > 500 else 62.0
    height = 12 + len(data.lanes) * LANE + HEAD * len([host for host in hosts if host]) + 34
    canvas = Canvas(width, height, name, "Timeline", data.summary)
    stuck = any(one.end_ns is None for lane in data.lanes for one in lane.operations)
    axis = _Axis(data.stretches, label + 14, width - 16 - (OPEN if stuck else 0))
    bottom = height - 30
    _cuts(canvas, axis, bottom)
    _ticks(canvas, axis, data, bottom)
    y = 12.0
    for lane, host in zip(data.lanes, hosts, strict=True):
        if host:
            canvas.text(0, y + 12, host, size=11, ink="muted", room=width)
            y += HEAD
        _lane(canvas, axis, lane, y, label, width)
        y += LANE
    return canvas.markup()


def _hosts(lanes: Sequence[Lane]) -> list[str]:
    """The host to be written above each lane, where another begins."""
    found, before = [], None
    for lane in lanes:
        new = lane.host if lane.host not in (before, lane.name) else None
        found.append(new or "")
        before = lane.host
    return found


def _cuts(canvas: Canvas, axis: _Axis, bottom: float) -> None:
    for at, (one, other) in enumerate(zip(axis.stretches, axis.stretches[1:], strict=False)):
        middle = (axis.sides[at][1] + axis.sides[at + 1][0]) / 2
        teeth = [(middle + (3 if number % 2 else -3), 6 + number * 7.0) for number in range(int((bottom - 4) / 7))]
        note = f"{duration(other.begin_ns - one.end_ns)} without a moment, cut out"
        canvas.path(polyline(teeth), stroke="grid", width=1.5, note=note)
        canvas.text(
            middle, bottom + 26, f"{duration(other.begin_ns - one.end_ns)} cut", size=10, ink="muted", anchor="middle", room=112
        )


def _ticks(canvas: Canvas, axis: _Axis, data: Timeline, bottom: float) -> None:
    zero = data.zero_ns or axis.stretches[0].begin_ns
    free = 0.0
    for one, (left, right) in zip(axis.stretches, axis.sides, strict=True):
        count = max(1, int((right - left) / TICK))
        step = _nice((one.end_ns - one.begin_ns) / count)
        begin = math.ceil((one.begin_ns - zero) / step) * step if step else one.begin_ns - zero
        places = [zero + begin + number * step for number in range(count + 2)] if step else [one.begin_ns]
        shown = [place for place in places if one.begin_ns <= place <= one.end_ns] or [one.begin_ns]
        for place in shown:
            x, text = axis(place), _tick(int(place - zero), step)
            canvas.path(polyline([(x, 6), (x, bottom)]), stroke="grid", width=1)
            half = len(text) * 3.4
            middle = min(x, canvas.width - half - 2)
            if middle - half > free:
                canvas.text(middle, bottom + 13, text, size=10.5, ink="muted", anchor="middle")
                free = middle + half + 4


def _tick(ns: int, step: int) -> str:
    """A time after zero, with as many digits as tell ticks apart that are `step` nanoseconds from each other."""
    if not 0 < step < SECOND or ns == 0:
        return since(ns)
    scale, unit = (SECOND, "s") if step >= SECOND // 10 or abs(ns) >= SECOND else (10**6, "ms")
    return f"{ns / scale:+.{min(3, max(0, math.ceil(-math.log10(step / scale))))}f} {unit}"


def _nice(length: float) -> int:
    """A step of 1, 2 or 5 in a unit that people count in, no shorter than this many nanoseconds."""
    if length <= 0:
        return 0
    if length < 60 * SECOND:
        power = 10 ** math.floor(math.log10(length))
        return max(1, int(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= length * 0.999)))
    steps = [minutes * 60 * SECOND for minutes in (1, 2, 5, 10, 20, 30, 60, 120, 240, 480, 720, 1440)]
    return next((step for step in steps if step >= length), math.ceil(length / (86400 * SECOND)) * 86400 * SECOND)


def _lane(canvas: Canvas, axis: _Axis, lane: Lane, y: float, label: float, width: float) -> None:
    middle = y + LANE / 2
    ink = "fault" if lane.blamed else "text"
    canvas.text(label, middle + 4, lane.name, size=12, ink=ink, bold=lane.blamed, anchor="end", room=label - 4)
    canvas.path(polyline([(label + 8, middle), (width - 6, middle)]), stroke="lane", width=2)
    for operation in lane.operations:
        _bar(canvas, axis, operation, middle)
    for mark in lane.marks:
        _whisker(canvas, axis, mark, middle)
    for marks in _near(axis, lane.marks):
        _mark(canvas, axis, marks, middle)


def _bar(canvas: Canvas, axis: _Axis, operation: Operation, middle: float) -> None:
    open_ = operation.end_ns is None
    begin = axis(operation.begin_ns)
    end = axis(operation.end_ns) if operation.end_ns is not None else axis.sides[-1][1] + OPEN
    number = f" #{operation.seq}" if operation.seq is not None else ""
    group = f" of {operation.group}" if operation.group else ""
    took = "never seen to end" if operation.end_ns is None else duration(operation.end_ns - operation.begin_ns)
    canvas.box(
        begin, middle - 5, max(end - begin, 1.5), 10, fill="stall" if open_ else "control", stroke="warn" if open_ else "", line=1, round_=2,
        note=f"{operation.name}{number}{group}, {took}",
    )  # fmt: skip


def _whisker(canvas: Canvas, axis: _Axis, mark: Mark, middle: float) -> None:
    left, right = (axis(mark.t_ns + sign * mark.uncertainty_ns) for sign in (-1, 1))
    if right - left < 4:
        return
    y, note = middle + 9, f"may be off by {duration(mark.uncertainty_ns)}"
    canvas.path(f"M{left:.1f} {y - 3:.1f}v6m0 -3H{right:.1f}m0 -3v6", stroke=_INKS[mark.part], width=1.2, note=note)


def _near(axis: _Axis, marks: Sequence[Mark]) -> list[list[Mark]]:
    found: list[list[Mark]] = []
    for mark in marks:
        if found and axis(mark.t_ns) - axis(found[-1][0].t_ns) < NEAR:
            found[-1].append(mark)
        else:
            found.append([mark])
    return found


def _mark(canvas: Canvas, axis: _Axis, marks: Sequence[Mark], middle: float) -> None:
    """A mark with its number: a diamond for a cause, a disc for what confirms it, a ring for all else; several as one, with `+`."""
    telling = min(marks, key=lambda mark: ("cause", "confirm", "effect", "other").index(mark.part))
    x, ink = axis(telling.t_ns), _INKS[telling.part]
    note = "\n".join(f"{mark.number}. {mark.text}" for mark in marks[:8])
    if telling.part == "cause":
        canvas.path(f"M{x:.1f} {middle - 10:.1f}l10 10l-10 10l-10 -10z", fill=ink, stroke="surface", note=note)
    else:
        fill = ink if telling.part == "confirm" else "surface"
        canvas.box(x - 8, middle - 8, 16, 16, fill=fill, stroke=ink if fill == "surface" else "surface", round_=8, note=note)
    inside = "surface" if telling.part in ("cause", "confirm") else "text"
    text = f"{telling.number}{'+' if len({mark.number for mark in marks}) > 1 else ''}"
    canvas.text(x, middle + 3.4, text, size=9.5 if len(text) < 3 else 8, ink=inside, bold=True, anchor="middle")
