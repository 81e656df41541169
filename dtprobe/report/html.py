"""The page as one HTML file: no outside asset, no script, everything escaped by the template engine."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dtprobe.catalog import PACKAGE
from dtprobe.report import figures, svg, words
from dtprobe.report.page import MetricRow, Page
from dtprobe.report.series import Panel
from dtprobe.report.timeline import Timeline


def templates() -> Path:
    """The folder of the templates: the checkout's, or the one that the wheel carries."""
    checkout = PACKAGE.parent / "reports" / "templates"
    return checkout if checkout.is_dir() else PACKAGE / "content" / "reports" / "templates"


def environment() -> Environment:
    """The template engine for HTML: escapes every value, fails on a name that does not exist."""
    engine = Environment(
        loader=FileSystemLoader(templates()),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    engine.filters["href"] = href
    engine.filters["listed"] = words.listed
    engine.filters["number"] = words.number
    return engine


def href(path: str) -> str:
    """A path in the run folder as a relative link. The leading `./` keeps a file name with a colon from being a scheme."""
    return f"./{quote(path)}"


def render(page: Page) -> str:
    """The whole document."""
    return environment().get_template("run.html.j2").render(page=page, draw=_Pictures(page))


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
