"""Figures of a report. They take what `series` and `timeline` computed and draw it; nothing is computed here but positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dtprobe.report import words
from dtprobe.report.series import Panel, Window
from dtprobe.report.svg import INK, style
from dtprobe.report.timeline import Lane, Timeline
from dtprobe.scenario import ARMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = (340, 200)
WIDE = 920
NARROW = 340
LANE = 58
"""Height of a rank's lane, in pixels like all sizes here."""
GLYPH = 5.6
"""Width of a letter of a label, about: the page's font is the reader's, so labels keep some distance."""
HEAD_ROWS = 3
_DASHES: Mapping[str, Any] = {"control": (0, (5, 2)), "fault": "solid", "mitigated": (0, (1.2, 1.4))}
_DOTS: Mapping[str, str] = {"control": "s", "fault": "o", "mitigated": "D"}


def ink(arm: str) -> str:
    """The colour of an arm, the same in every figure."""
    return getattr(INK, arm) if arm in ARMS else INK.muted


def panel(data: Panel) -> Figure:
    """One measure over time, a line an arm with the span of its traces, named at the right edge with its last value."""
    import matplotlib as mpl
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    with mpl.rc_context(style()):
        names = {arm: f"{arm} {words.number(value, data.unit)}" for arm, value in data.last.items()}
        right = 14 + min(7 * max(len(name) for name in names.values()), PANEL[0] // 2)
        figure, axes = _blank(*PANEL, left=48, right=right, top=10, bottom=26)
        for window in data.windows:
            _shade(axes, window, ink(window.arm))
        ends = []
        for arm, rows in data.lines.groupby("arm", sort=False):
            color, name = ink(str(arm)), str(arm)
            axes.fill_between(rows["t_s"], rows["low"], rows["high"], color=color, alpha=0.16, lw=0)
            axes.plot(rows["t_s"], rows["mid"], color=color, lw=2, ls=_DASHES.get(name, "solid"), solid_capstyle="round")
            last, peak = rows.iloc[-1], rows.loc[rows["mid"].idxmax()]
            if name == data.peak and peak["mid"] > 1.2 * abs(last["mid"]):
                text = words.number(peak["mid"], data.unit)
                axes.annotate(
                    text,
                    (peak["t_s"], peak["mid"]),
                    (0, 3),
                    textcoords="offset points",
                    color=color,
                    size=10.5,
                    weight="bold",
                    ha="center",
                )
            axes.plot([last["t_s"]], [last["mid"]], color=color, marker=_DOTS.get(name, "o"), ms=4.5)
            ends.append((float(last["mid"]), names[name], color))
        axes.set_ylim(*_room(float(data.lines["low"].min()), float(data.lines["high"].max())))
        axes.margins(x=0.02)
        axes.yaxis.set_major_locator(_binary_ticks(axes) if data.unit == "B" else MaxNLocator(4, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words.number(value, data.unit).replace(" ", "\u2009")))
        _seconds(axes)
        _labels(axes, ends)
        return figure


def interval(points: Mapping[str, tuple[float, float, float]], documented: tuple[float, ...] = ()) -> Figure:
    """A metric in all arms on one scale: a dot for the value, a bar for its interval, arms from top to bottom.

    `documented` are figures of the document on the same scale, drawn as lines.
    """
    import matplotlib as mpl

    with mpl.rc_context(style()):
        figure, axes = _blank(130, 15 * max(len(points), 1) + 4, left=4, right=4, top=2, bottom=2)
        for row, (arm, (value, low, high)) in enumerate(points.items()):
            axes.axhline(row, color=INK.grid, lw=1)
            axes.plot([low, high], [row, row], color=ink(arm), lw=4, alpha=0.35, solid_capstyle="round")
            axes.plot([value], [row], color=ink(arm), marker=_DOTS.get(arm, "o"), ms=6, mec=INK.surface, mew=1)
        axes.set_ylim(len(points) - 0.5, -0.5)
        for value in documented:
            axes.axvline(value, color=INK.text, lw=1.2, ls=(0, (2, 2)))
        ends = [*documented, *(end for _, low, high in points.values() for end in (low, high))]
        lowest, highest = min([0.0, *ends]), max([0.0, *ends])
        highest = highest if highest > lowest else lowest + 1.0
        spread = highest - lowest
        axes.set_xlim(lowest - 0.05 * spread, highest + 0.05 * spread)
        axes.set_axis_off()
        return figure


def timeline(data: Timeline, width: int, length_s: float) -> tuple[Figure, dict[str, str]]:
    """A lane a rank on one clock of `length_s` seconds; also what each gid means, for `svg.inline`'s notes."""
    import matplotlib as mpl

    left = 50 if width < 600 else 60
    with mpl.rc_context(style()):
        per_px = length_s / (width - left - 10)
        heads = [(window.begin_s, window.text, INK.fault) for window in data.windows]
        heads += [(t_s, "hang suspected", INK.warn) for t_s in data.suspected_s[:1]]
        placed = _rows_of_heads(heads, per_px, length_s)
        top = 6 + 14 * (1 + max((row for row, *_ in placed), default=-1))
        figure, axes = _blank(width, LANE * len(data.lanes) + top + 28, left=left, right=10, top=top, bottom=28)
        axes.set_xlim(-0.005 * length_s, length_s * 1.005)
        axes.set_ylim(len(data.lanes) - 0.4, -0.75)
        for window in data.windows:
            _shade(axes, window, INK.fault)
        for t_s in data.suspected_s:
            axes.axvline(t_s, color=INK.warn, lw=1.5, ls=(0, (3, 2)))
        for row, at, text, color in placed:
            axes.text(at, -0.77 - row * 14 / LANE, text, color=color, size=10, va="bottom", clip_on=False)
        notes: dict[str, str] = {}
        for row, lane in enumerate(data.lanes):
            notes |= _lane(axes, row, lane, data.arm, per_px, length_s)
        axes.set_yticks(range(len(data.lanes)), [lane.name for lane in data.lanes])
        axes.tick_params(axis="y", labelcolor=INK.text)
        axes.grid(visible=False, axis="y")
        _seconds(axes)
        return figure, notes


def _shade(axes: Axes, window: Window, color: str) -> None:
    """The time in which a fault was in place; a fault of one moment is a line."""
    if window.end_s > window.begin_s:
        axes.axvspan(window.begin_s, window.end_s, color=color, alpha=0.13, lw=0)
    else:
        axes.axvline(window.begin_s, color=color, lw=1.2, ls=(0, (1, 1.5)))


def _rows_of_heads(
    heads: Sequence[tuple[float, str, str]], per_px: float, length_s: float
) -> list[tuple[int, float, str, str]]:
    """(row, begin, text, colour) of the labels above the lanes: a label that would lie over another goes a row higher."""
    ends: list[float] = []
    placed = []
    for t_s, label, color in sorted(heads):
        text = words.clip(label, int(0.9 * length_s / per_px / GLYPH))
        size = len(text) * GLYPH * per_px
        begin = max(0.0, min(t_s, length_s - size))
        row = next((row for row, end in enumerate(ends) if begin >= end), len(ends))
        if row == HEAD_ROWS:
            continue
        ends[row:] = [begin + size + 8 * per_px, *ends[row + 1 :]]
        placed.append((row, begin, text, color))
    return placed


def _lane(axes: Axes, row: int, lane: Lane, arm: str, per_px: float, length_s: float) -> dict[str, str]:
    notes: dict[str, str] = {}
    axes.barh(row, lane.end_s - lane.begin_s, left=lane.begin_s, height=0.34, color=INK.lane, lw=0)
    taken: list[tuple[float, float]] = []  # stretches of the line under the lane that hold a label
    for index, span in enumerate(lane.spans):
        width = max(span.end_s - span.begin_s, 2 * per_px)
        gid = f"span-{row}-{index}"
        notes[gid] = f"{span.text}, from {words.number(span.begin_s, 's')} for {words.number(span.end_s - span.begin_s, 's')}"
        if span.kind == "start":
            axes.text((span.begin_s + span.end_s) / 2, row, span.text, color=INK.muted, size=10, ha="center", va="center")
        elif span.kind == "stall":
            axes.barh(row, width, left=span.begin_s, height=0.34, color=INK.stall, lw=0, gid=gid)
            _write(axes, row, (span.begin_s + span.end_s) / 2, span.text, INK.text, per_px, taken, inside=width, limit=length_s)
        elif span.kind == "waiting":
            axes.barh(row, width, left=span.begin_s, height=0.34, fill=False, ec=ink(arm), hatch="////", lw=1.2, gid=gid)
            text = f"waits in {span.text}, {words.number(span.end_s - span.begin_s, 's')}"
            _write(axes, row, (span.begin_s + span.end_s) / 2, text, INK.text, per_px, taken, limit=length_s)
        else:
            axes.barh(row, width, left=span.begin_s, height=0.34, color=ink(arm), lw=0, gid=gid)
    for index, mark in enumerate(lane.marks):
        gid = f"mark-{row}-{index}"
        times = f", {mark.count} times" if mark.count > 1 else ""
        notes[gid] = f"{mark.text} at {words.number(mark.t_s, 's')}{times}"
        axes.plot([mark.t_s], [row - 0.28], marker="v", ms=5.5, color=INK.text, lw=0, gid=gid)
    above: list[tuple[float, float]] = []
    firsts = {mark.text: mark for mark in reversed(lane.marks)}
    for mark in sorted(firsts.values(), key=lambda mark: (mark.common, mark.t_s)):  # what is rare finds a place first
        _write(axes, row, mark.t_s, mark.text, INK.muted, per_px, above, limit=length_s, above=True)
    if not lane.ending:
        return notes
    color = INK.fault if lane.bad else INK.text
    axes.plot([lane.end_s], [row], marker="X" if lane.bad else "|", ms=9, mew=1 if lane.bad else 2, color=color, mec=color)
    _write(axes, row, lane.end_s, lane.ending, color, per_px, taken, limit=length_s)
    return notes


def _write(
    axes: Axes, row: int, at: float, text: str, color: str, per_px: float, taken: list[tuple[float, float]], *,
    limit: float, inside: float = 0.0, above: bool = False,
) -> None:  # fmt: skip
    """A label near a point of a lane, above or under it, unless it would lie over one that is already there."""
    half = len(text) * GLYPH / 2 * per_px
    center = min(max(at, half), limit - half)
    if inside and 2 * half < inside:
        axes.text(at, row, text, color=color, size=10, ha="center", va="center")
        return
    if center - half < -1e-9 or any(center - half < end and center + half > begin for begin, end in taken):
        return
    taken.append((center - half - 4 * per_px, center + half + 4 * per_px))
    axes.text(
        center, row - 0.4 if above else row + 0.2, text, color=color, size=10, ha="center", va="bottom" if above else "top"
    )


def _blank(width: int, height: int, *, left: int, right: int, top: int, bottom: int) -> tuple[Figure, Axes]:
    """A figure of that many CSS pixels with one bare plot in it, margins in pixels too."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasSVG(figure)
    axes = figure.add_axes((left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height))
    axes.patch.set_visible(False)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(INK.muted)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=INK.grid, lw=1)
    axes.tick_params(axis="both", length=0, labelcolor=INK.muted, labelsize=10, pad=5)
    axes.tick_params(axis="x", length=3, color=INK.muted)
    return figure, axes


def _seconds(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(5, min_n_ticks=3))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))


def _binary_ticks(axes: Axes) -> Any:
    from matplotlib.ticker import MultipleLocator

    top = axes.get_ylim()[1]
    step = 1 << 20
    while top / step > 5:
        step *= 2
    return MultipleLocator(step)


def _room(low: float, high: float) -> tuple[float, float]:
    """Limits that begin at zero unless all values lie in a narrow band far from it."""
    base = 0.0 if low >= 0 and low < high * 0.8 else low - 0.15 * ((high - low) or 1)
    return min(base, low), high + 0.12 * ((high - base) or 1)


def _labels(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names of the lines at the right edge, moved apart where they would lie over each other."""
    low, high = axes.get_ylim()
    span, gap = high - low, 0.105
    placed: list[list[float]] = []
    for index, (value, _, _) in sorted(enumerate(ends), key=lambda item: item[1][0]):
        at = (value - low) / span
        placed.append([max(at, placed[-1][0] + gap) if placed else max(at, 0.02), index])
    overflow = placed[-1][0] - 0.98 if placed else 0
    if overflow > 0:
        for i in range(len(placed) - 1, -1, -1):
            ceiling = 0.98 if i == len(placed) - 1 else placed[i + 1][0] - gap
            placed[i][0] = min(placed[i][0], ceiling)
    for height, position in placed:
        _, text, color = ends[int(position)]
        axes.text(1.03, height, text, color=color, size=10.5, weight="bold", transform=axes.transAxes, va="center")
