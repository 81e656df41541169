"""Small figures drawn as SVG text: hundreds of trends a second, where a plotting library draws twenty.

Colours come from the page's classes, so that they follow its scheme and the page needs no inline style.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from markupsafe import Markup, escape

from dtprobe.report import words
from dtprobe.scenario import ARMS
from dtprobe.site.known import Point, Trend

WIDTH, HEIGHT = 400, 180
LEFT, RIGHT, TOP, BOTTOM = 60, 10, 34, 24
BAR, GAP, TALL = 5, 2, 16
NOTE = 78
"""Room of a mark's name; of two marks that stand closer the second has none on the figure, only its title."""
MOST = 400
"""Points of an arm that are drawn; of more, the last of each stretch."""
_SHAPES = {"control": "M-3 -3h6v6h-6z", "fault": "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z", "mitigated": "M0 -4l4 4l-4 4l-4 -4z"}


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment on a trend. `kind` is regression, change (of level) or version."""

    at_ns: int
    kind: str
    text: str


def sparkline(rates: Sequence[float]) -> Markup:
    """Shares between 0 and 1, oldest left: a full bar is all as expected, a gap with a foot none. Its text stands beside it."""
    if not rates:
        return Markup("")
    bars = []
    for index, rate in enumerate(rates):
        height = max(2, round(rate * TALL))
        kind = "all" if rate == 1 else "some"
        bars.append(
            f'<rect class="rate-{kind}" x="{index * (BAR + GAP)}" y="{TALL - height}" width="{BAR}" height="{height}"/>'
        )
    width = len(rates) * (BAR + GAP) - GAP
    return Markup(
        f'<svg class="spark" viewBox="0 0 {width} {TALL}" width="{width}" height="{TALL}" aria-hidden="true">{"".join(bars)}</svg>'
    )


def trend(data: Trend, name: str, marks: Sequence[Mark]) -> Markup:
    """A metric over time: a line an arm with its intervals, regressions and changes of torch as lines across. `name` is unique in the page."""
    points = [point for arm in data.arms.values() for point in arm]
    first, last = min(point.started_ns for point in points), max(point.started_ns for point in points)
    low = min(point.value if point.low is None else point.low for point in points)
    high = max(point.value if point.high is None else point.high for point in points)
    if low == high:
        low, high = low - abs(low or 1) / 2, high + abs(high or 1) / 2
    if 0 < low < (high - low) / 2:
        low = 0.0

    def across(at_ns: int) -> float:
        room = WIDTH - LEFT - RIGHT
        return LEFT + (room / 2 if first == last else room * (at_ns - first) / (last - first))

    def down(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    parts = [_grid(data, low, high, down), _dates(first, last, across)]
    taken: dict[str, float] = {}
    for mark in sorted(marks, key=lambda mark: mark.at_ns):
        x = across(mark.at_ns)
        if first <= mark.at_ns <= last:
            parts.append(_mark(mark, x, named=x - taken.get(mark.kind, -WIDTH) > NOTE))
            taken[mark.kind] = x if x - taken.get(mark.kind, -WIDTH) > NOTE else taken[mark.kind]
    parts += [_arm(arm, _thinned(data.arms[arm]), across, down) for arm in ARMS if arm in data.arms]
    parts += [_arm(arm, _thinned(some), across, down) for arm, some in data.arms.items() if arm not in ARMS]
    title = f"{data.metric.replace('_', ' ')} over {len({point.run for point in points})} runs"
    return Markup(
        f'<svg class="trend" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(described(data, marks))}</desc>{"".join(parts)}</svg>'
    )


def described(data: Trend, marks: Sequence[Mark]) -> str:
    """The figure in words."""
    told = [
        f"{arm} from {words.number(points[0].value, data.unit)} to {words.number(points[-1].value, data.unit)}"
        for arm, points in data.arms.items()
    ]
    return "; ".join([*told, *(mark.text for mark in marks if mark.kind != "version")])


def _grid(data: Trend, low: float, high: float, down) -> str:
    ticks = []
    for share in (0, 0.5, 1):
        value = low + share * (high - low)
        y = down(value)
        label = escape(words.number(value, data.unit if data.unit in words.MEASURES else ""))
        ticks.append(
            f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/><text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
    return "".join(ticks)


def _dates(first: int, last: int, across) -> str:
    y = HEIGHT - 6
    if first == last:
        return f'<text class="tick" x="{across(first):.1f}" y="{y}" text-anchor="middle">{_day(first)}</text>'
    return f'<text class="tick" x="{LEFT}" y="{y}">{_day(first)}</text><text class="tick" x="{WIDTH - RIGHT}" y="{y}" text-anchor="end">{_day(last)}</text>'


def _day(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9, UTC).strftime("%Y-%m-%d")


def _mark(mark: Mark, x: float, *, named: bool) -> str:
    anchor = "end" if x > WIDTH - NOTE else "start"
    shift = -4 if anchor == "end" else 4
    head = f'<path class="flag" d="M{x:.1f} {TOP}l-5 -8h10z"/>' if mark.kind == "regression" else ""
    note = {"regression": "regression", "change": "new level"}.get(mark.kind) or escape(mark.text)
    y = {"regression": 12, "change": TOP + 12}.get(mark.kind, 27)
    text = f'<text class="note" x="{x + shift:.1f}" y="{y}" text-anchor="{anchor}">{note}</text>' if named else ""
    return (
        f'<g class="mark-{mark.kind}"><title>{escape(mark.text)}</title>'
        f'<path class="across" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>{head}{text}</g>'
    )


def _arm(arm: str, points: Sequence[Point], across, down) -> str:
    places = [(across(point.started_ns), down(point.value)) for point in points]
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    spans = "".join(
        f"M{x:.1f} {down(point.low):.1f}V{down(point.high):.1f}"
        for (x, _), point in zip(places, points, strict=True)
        if point.low is not None and point.high is not None and len(points) <= 60
    )
    shape = _SHAPES.get(arm, _SHAPES["control"])
    dots = "".join(
        f'<path d="{shape}" transform="translate({x:.1f} {y:.1f})"/>' for x, y in (places if len(places) <= 40 else places[-1:])
    )
    kind = arm if arm in ARMS else "other"
    return f'<g class="arm-of-{kind}">{f"""<path class="span" d="{spans}"/>""" if spans else ""}<path class="line" d="{line}"/>{dots}</g>'


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    step = -(-len(points) // MOST)
    return points[::-1][::step][::-1] if step > 1 else points
