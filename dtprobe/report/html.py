"""The page as one HTML file: no outside asset, no script, everything escaped by the template engine."""

from __future__ import annotations

from markupsafe import Markup

from dtprobe.report import engine, figures, svg
from dtprobe.report.page import MetricRow, Page
from dtprobe.report.series import Panel
from dtprobe.report.timeline import Timeline


def render(page: Page) -> str:
    """The whole document."""
    return engine.for_html().get_template("run.html.j2").render(page=page, draw=_Pictures(page))


class _Pictures:
    """Draws the page's figures when the template asks for one."""

    def __init__(self, page: Page) -> None:
        self._rows = {row.name: index for index, row in enumerate(page.metrics, start=1)}
        lengths = [item.length_s for item in page.timelines]
        self.one_scale = bool(lengths) and max(lengths) <= 6 * min(lengths)
        self.longest_s = max(lengths, default=0.0)

    def panel(self, data: Panel) -> Markup:
        return Markup(svg.inline(figures.panel(data), f"panel-{data.name}", data.title, data.summary))

    def interval(self, row: MetricRow) -> Markup:
        told = "; ".join(f"{cell.arm} {cell.value}" for cell in row.cells)
        return Markup(
            svg.inline(figures.interval(row.points, row.documented_values), f"metric-{self._rows[row.name]}", row.name, told)
        )

    def timeline(self, data: Timeline, size: str) -> Markup:
        length_s = self.longest_s if self.one_scale else data.length_s
        width = figures.NARROW if size == "narrow" else figures.WIDE
        figure, notes = figures.timeline(data, width, length_s)
        title = f"Timeline of the {data.arm} arm"
        return Markup(svg.inline(figure, f"timeline-{data.arm}-{size}", title, data.summary, notes))
