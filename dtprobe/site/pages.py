"""One page at a time, by its path in the site: the same for a folder on disk and for `dtprobe serve`."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup, escape

from dtprobe.report import engine, words
from dtprobe.site import charts, confusion
from dtprobe.site.known import STATUSES, Cell, Known, Run, Scenario, Trend, status_of
from dtprobe.site.nights import ILL, Night
from dtprobe.trends import Regression

SHOWN = 250
"""Runs that a scenario's page lists; older ones are in its trends and its counts."""
FEW = 12
"""What broke, on the overview; a night's own page has all."""
NIGHTS = 60
"""Earlier nights whose regressions are listed."""
REPORT = "report.html"
GONE, NONE, LEFT_OUT = "folder gone", "no report in it", "report not copied"
REGRESSION = tuple(one.name for one in fields(Regression))
FIXED = ("index.html", "nights.html", "regressions.html", "claims.html", "confusion.html")


class Pages:
    """Renders pages of what is known.

    `copied` names the runs whose reports are in a static site; None where each report is served from its run's folder (`live`).
    """

    def __init__(self, known: Known, *, copied: frozenset[str] | None = None) -> None:
        self.known = known
        self.live = copied is None
        self._copied = copied
        self._engine = engine.for_html()
        sources = engine.templates()
        style = (sources / "style.css").read_text(encoding="utf-8") + (sources / "site" / "site.css").read_text(
            encoding="utf-8"
        )
        script = (sources / "site" / "site.js").read_text(encoding="utf-8")
        self._style, self._script = Markup(style), Markup(script)
        self.policy = (
            f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; img-src data:; base-uri 'none'; "
            + ("connect-src 'self'; form-action 'self'" if self.live else "form-action 'none'")
        )

    def paths(self) -> Iterator[str]:
        """Every page but the runs' reports."""
        yield from FIXED
        yield from (f"scenarios/{one.slug}.html" for one in self.known.scenarios)
        yield from (f"nights/{night.id}.html" for night in self.known.nights)

    def render(self, path: str) -> str | None:
        """The page at a path of the site, None where there is none."""
        whole: dict[str, Callable[[], str]] = {
            "index.html": self._index,
            "nights.html": lambda: self._page("nights.html", "nights"),
            "regressions.html": self._all_regressions,
            "claims.html": self._claims,
            "confusion.html": lambda: self._page("confusion.html", "confusion", found=confusion.load(self.known.out)),
        }
        if path in whole:
            return whole[path]()
        kind, _, name = path.partition("/")
        name = name.removesuffix(".html")
        if kind == "scenarios":
            scenario = self.known.scenario(name)
            return self._scenario(scenario) if scenario else None
        if kind == "nights":
            night = next((one for one in self.known.nights if one.id == name), None)
            return self._night(night) if night else None
        return None

    def report(self, run: Run, path: Path) -> str:
        """A run's own report with a way back; links to raw files only where they are there to be followed."""
        text = path.read_text(encoding="utf-8")
        back = f'<p class="over"><a href="../../../scenarios/{quote(run.slug)}.html">All runs of {escape(run.scenario)}</a></p>'
        if not self.live:
            text = text.replace('href="./', 'data-file="./')
            back += '<p class="notice">A copy without the raw files: they stay in the run folder.</p>'
        return text.replace('<main id="content">', f'<main id="content">{back}', 1)

    def own(self, template: str, here: str, **context: Any) -> str:
        """A page that is no part of a static site: the comparison, a refusal."""
        return self._page(template, here, **context)

    def _page(self, template: str, here: str, depth: int = 0, **context: Any) -> str:
        return self._engine.get_template(f"site/{template}.j2").render(
            root="../" * depth or "./",
            here=here,
            site=self,
            known=self.known,
            css=self._style,
            js=self._script,
            when=when,
            day=day,
            clip=words.clip,
            status_of=status_of,
            name_of=name_of,
            **context,
        )

    def where(self, run: Run) -> tuple[str, str]:
        """A run's report: its path in the site, or why there is none."""
        if not run.there:
            return "", GONE
        if self._copied is not None:
            return (f"runs/{quote(run.slug)}/{quote(run.id)}/{REPORT}", "") if run.id in self._copied else ("", LEFT_OUT)
        if not (self.known.folder(run) / REPORT).is_file():
            return "", NONE
        return f"runs/{quote(run.slug)}/{quote(run.id)}/{REPORT}", ""

    def spark(self, cell: Cell) -> Markup:
        return charts.sparkline(cell.rates)

    def _index(self) -> str:
        last = next((night for night in self.known.nights if night.state == "finished"), None)
        running = next((night for night in self.known.nights if night.state == "running"), None)
        shown = sorted(self.known.scenarios, key=_order)
        return self._page(
            "index.html",
            "overview",
            night=last,
            running=running,
            broke=self._broke(last, shown),
            few=FEW,
            regressions=self.linked(self.known.regressions)[:FEW],
            scenarios=shown,
            layers=sorted({one.layer for one in shown}),
            tags=sorted({tag for one in shown for tag in one.tags}),
            statuses=[one for one in dict.fromkeys(scenario.status for scenario in shown)],
        )

    def _broke(self, night: Night | None, shown: Sequence[Scenario]) -> list[Mapping[str, Any]]:
        """Rows of the last night that are ill; where there was no night, the scenarios whose last run was not as expected."""
        if night is not None:
            return [self.row(row) for row in night.rows() if row.get("status") in ILL]
        return [
            self.row(
                {
                    "scenario": one.id,
                    "status": one.status,
                    "verdict": one.last.verdict,
                    "expected": one.last.expected,
                    "run": one.last.id,
                }
            )
            for one in shown
            if one.last is not None and one.status in ("not-as-expected", "error")
        ]

    def row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row of a night as the templates print it: with the scenario's page and the run's report, where they exist."""
        name = str(row["scenario"])
        scenario = next((one for one in self.known.scenarios if one.id == name), None)
        run = self.known.runs.get(str(row.get("run") or str(row.get("folder") or "").rpartition("/")[2]))
        report, why = self.where(run) if run else ("", "")
        return {
            "scenario": words.clip(name, 120),
            "page": f"scenarios/{quote(scenario.slug)}.html" if scenario else "",
            "title": words.clip(row.get("title") or (scenario.title if scenario else ""), 200),
            "status": words.clip(row.get("status") or "unknown", 40),
            "verdict": words.clip(row.get("verdict") or "", 40),
            "expected": words.clip(row.get("expected") or "", 40),
            "mitigation": words.clip(row.get("mitigation") or "none", 20),
            "because": words.clip(row.get("because") or "", 2000),
            "claim": words.clip(row.get("claim") or "", 2000),
            "took_s": row.get("took_s"),
            "runs": row.get("runs") or (),
            "report": report,
            "why": why,
        }

    def _all_regressions(self) -> str:
        now = self.linked(self.known.regressions)
        return self._page(
            "regressions.html", "regressions", regressions=now, earlier=self.linked(self.known.earlier_regressions(NIGHTS))
        )

    def linked(self, regressions: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Regressions as the templates print them, with what they link to, the newest first."""
        found = []
        for one in regressions:
            first, last = (self.known.runs.get(str(one.get(key))) for key in ("first_bad_run", "last_good_run"))
            scenario = next((known for known in self.known.scenarios if known.id == one.get("scenario")), None)
            links = {
                "page": f"scenarios/{quote(scenario.slug)}.html" if scenario else "",
                "first_report": self.where(first)[0] if first else "",
                "last_report": self.where(last)[0] if last else "",
            }
            found.append({**{name: None for name in REGRESSION}, **one, **links})
        return sorted(found, key=lambda one: -(one["first_bad_ns"] or 0))

    def _scenario(self, scenario: Scenario) -> str:
        mine = self.linked([one for one in self.known.regressions if one.get("scenario") == scenario.id])
        trends = self.known.trends(scenario)
        figures = [
            (trend, charts.trend(trend, f"trend-{index}", self._marks(scenario, trend, mine)))
            for index, trend in enumerate(trends)
        ]
        rows = [(run, *self.where(run)) for run in reversed(scenario.runs[-SHOWN:])]
        return self._page(
            "scenario.html", "overview", 1, scenario=scenario, regressions=mine, figures=figures, rows=rows, shown=SHOWN
        )

    def _marks(self, scenario: Scenario, trend: Trend, regressions: Sequence[Mapping[str, Any]]) -> list[charts.Mark]:
        marks = []
        torch = scenario.runs[0].version.torch if scenario.runs else ""
        seen = {torch}
        for run in scenario.runs:
            if run.version.torch not in seen:
                seen.add(run.version.torch)
                marks.append(charts.Mark(at_ns=run.started_ns, kind="version", text=f"torch {run.version.torch}"))
        for arm, points in trend.arms.items():
            for point in self.known.changes(points):
                text = f"{arm} stays at another level from {day(point.started_ns)}"
                marks.append(charts.Mark(at_ns=point.started_ns, kind="change", text=text))
        for one in regressions:
            if one.get("first_bad_ns") and one.get("metric") in (None, "", trend.metric):
                text = f"{one.get('kind')} regression: {one.get('before')} to {one.get('after')}"
                marks.append(charts.Mark(at_ns=int(one["first_bad_ns"]), kind="regression", text=words.clip(text, 200)))
        return marks

    def _night(self, night: Night) -> str:
        data = night.load()
        return self._page(
            "night.html",
            "nights",
            1,
            night=night,
            data=data,
            rows=[self.row(row) for row in night.rows()],
            regressions=self.linked(night.regressions()),
        )

    def _claims(self) -> str:
        """Each scenario's latest row among the nights: claims and why stand in summaries, not in the history."""
        rows: dict[str, Mapping[str, Any]] = {}
        wanted = len(self.known.scenarios)
        for night in self.known.nights:
            if night.state != "finished":
                continue
            for row in night.rows():
                if row.get("verdict") not in (None, "", "unsupported"):
                    rows.setdefault(str(row["scenario"]), {**self.row(row), "night": night})
            if len(rows) >= wanted:
                break
        return self._page("claims.html", "claims", rows=[rows[name] for name in sorted(rows)])


def name_of(metric: str, unit: str = "") -> str:
    """A metric as a reader says it: without the unit that its figures have anyway."""
    return (metric.removesuffix("_s") if unit == "s" else metric).replace("_", " ")


def when(at_ns: int | None) -> str:
    """A moment in UTC to the minute."""
    return datetime.fromtimestamp(at_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC") if at_ns else "unknown"


def day(at_ns: int | None) -> str:
    return datetime.fromtimestamp(at_ns / 1e9, UTC).strftime("%Y-%m-%d") if at_ns else "unknown"


def _order(scenario: Scenario) -> tuple[int, int, str]:
    """What is wrong now comes before what was wrong under a version that is run no more."""
    now = STATUSES.index(status_of(scenario.last)) if scenario.last else len(STATUSES)
    return now, STATUSES.index(scenario.status), scenario.id


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
