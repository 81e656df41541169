"""A suite's result: on the terminal while it runs, as a page, as Markdown, and as the table of claims.

The page and the table are made from `summary.json` alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.report import engine, words

if TYPE_CHECKING:
    from dtprobe.suite import Ran, SuiteResult

STATUSES = ("broken", "not-as-expected", "failed", "flaky", "not-run", "as-expected", "left-out", "unsupported")
"""In the order in which a reader wants them."""
QUIET = ("as-expected", "left-out", "unsupported")
STYLES = {"as-expected": "green", "unsupported": "yellow", "not-run": "yellow", "left-out": "yellow", "flaky": "yellow"}
UP = "../../"
"""From a suite's folder to the run folders."""


@dataclass(frozen=True, kw_only=True)
class Row:
    scenario: str
    title: str
    claim: str
    status: str
    verdict: str
    expected: str | None
    mitigation: str
    because: str
    took_s: float
    folder: str
    figures: tuple[str, ...]
    again: tuple[Mapping[str, Any], ...]
    """Each run of a scenario that was run more than once."""

    @property
    def took(self) -> str:
        return words.number(self.took_s, "s")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What the templates print."""

    headline: str
    began: str
    well: bool
    interrupted: bool
    counts: tuple[tuple[str, int], ...]
    facts: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]
    night: str
    regressions: tuple[Mapping[str, Any], ...]
    baseline: Mapping[str, Any] | None
    """Of a night that was compared with one: the pinned `night`, how the machine is `elsewhere`, and what `differs`."""

    @property
    def odd(self) -> list[Row]:
        """What a reader wants to see at once."""
        return [row for row in self.rows if row.status not in QUIET]

    @property
    def rest(self) -> list[Row]:
        return [row for row in self.rows if row.status in QUIET]

    @property
    def claims(self) -> list[Row]:
        """Scenarios that were run, by name."""
        return sorted((row for row in self.rows if row.verdict not in ("", "unsupported")), key=lambda row: row.scenario)


def build(data: Mapping[str, Any]) -> Summary:
    """The content, from a `summary.json`."""
    rows = [_row(one) for one in data["scenarios"]]
    counts = tuple((status, n) for status in STATUSES if (n := sum(row.status == status for row in rows)))
    good = sum(row.status == "as-expected" for row in rows)
    left = [
        f"{n} {status.replace('-', ' ')}" for status, n in counts if status in ("flaky", "unsupported", "not-run", "left-out")
    ]
    versions, machine = data["versions"], data["machine"]
    facts = {
        "took": words.number(data["took_s"], "s"),
        "at a time": data["jobs"],
        "repeats": data["repeats"] or "each scenario's own",
        "runs": data.get("runs", 1),
        "seed": data["seed"],
        "torch": versions.get("torch") or "none",
        "Python": machine.get("python") or "unknown",
        "machine": f"{machine.get('cores', '?')} cores, {machine.get('kernel', 'unknown kernel')}",
    }
    return Summary(
        headline=", ".join((f"{good} of {len(rows)} scenarios as expected", *left)),
        began=datetime.fromtimestamp(data["began_ns"] / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        well=data["well"],
        interrupted=data["interrupted"],
        counts=counts,
        facts=tuple((key, str(value)) for key, value in facts.items()),
        rows=tuple(sorted(rows, key=lambda row: STATUSES.index(row.status))),
        night=data.get("night", ""),
        regressions=tuple(data.get("regressions", ())),
        baseline=data.get("baseline"),
    )


def write(folder: Path, data: Mapping[str, Any]) -> Path:
    """Write summary.html and summary.md beside summary.json; answers the page's path."""
    summary = build(data)
    page = folder / "summary.html"
    try:
        page.write_text(engine.for_html().get_template("suite.html.j2").render(suite=summary, up=UP), encoding="utf-8")
        text = engine.for_markdown().get_template("suite.md.j2").render(suite=summary)
        (folder / "summary.md").write_text(text, encoding="utf-8")
    except OSError as error:
        raise DtprobeError(f"cannot write the summary into {folder}: {error.strerror}", "free space") from error
    return page


def check_file(option: str, path: Path) -> None:
    """Raise UsageError where this file could not be written: that is better known before than after the suite."""
    if not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
        raise UsageError(f"{option} {path}: no such file can be written", "name a file in a folder that exists")


def write_claims(path: Path, data: Mapping[str, Any]) -> None:
    """Write the table of claims, as Markdown."""
    text = engine.for_markdown().get_template("claims.md.j2").render(suite=build(data))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DtprobeError(f"cannot write {path}: {error.strerror}", "name another file with --claims") from error


def _row(one: Mapping[str, Any]) -> Row:
    return Row(
        **{name: one[name] for name in Row.__dataclass_fields__ if name not in ("figures", "again")},
        again=tuple(one.get("runs", ())),
        figures=tuple(
            f"{name.replace('_', ' ')}: {metric['documented']}, here {words.number(metric['fault'], metric['unit'])}"
            f" ({words.number(metric['control'], metric['unit'])})"
            for name, metric in one["metrics"].items()
            if metric["documented"]
        ),
    )


class Lines:
    """A line for each scenario as it ends; on a terminal also a bar with those that run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = TaskID(0)
        self._running: dict[str, None] = {}
        self._total = self._done = 0

    def begin(self, total: int) -> None:
        self._total = total
        self._bar.start()
        self._task = self._bar.add_task("", total=total)

    def started(self, scenario: str) -> None:
        self._running[scenario] = None
        self._show()

    def ended(self, row: Ran) -> None:
        self._running.pop(f"{row.scenario}#{row.number + 1}" if row.number else row.scenario, None)
        self._done += 1
        self._total = max(self._total, self._done)  # runs of what was not as expected come on top
        again = f" (run {row.number + 1})" if row.number else ""
        line = Text(f"[{self._done}/{self._total}] {row.scenario}{again}: ")
        line.append(row.status, STYLES.get(row.status, "bold red"))
        line.append(f" ({row.verdict or 'no verdict'}, {words.number(row.took_s, 's')})")
        if row.status not in ("as-expected", "unsupported", "left-out"):
            line.append(f" {words.clip(row.because, 200)}")
        self._console.print(line, soft_wrap=True)
        self._show()

    def end(self) -> None:
        self._bar.stop()

    def _show(self) -> None:
        self._bar.update(self._task, completed=self._done, description=words.clip(", ".join(self._running), 60))


def render(result: SuiteResult, console: Console) -> None:
    """The end of a suite: counts, what was not as expected and why."""
    summary = build(result.as_json())
    console.print(Text(summary.headline, "bold green" if result.well else "bold red"))
    table = Table("scenario", "result", "verdict", "why", box=None, pad_edge=False, header_style="bold")
    odd = [row for row in summary.rows if row.status != "as-expected"]
    for row in odd:
        style = STYLES.get(row.status, "bold red")
        table.add_row(
            *(Text(one) for one in (row.scenario, row.status, row.verdict, words.clip(row.because, 160))), style=style
        )
    if odd:
        console.print(table)
    if summary.baseline is not None:
        differs = summary.baseline["differs"]
        console.print(Text(f"against the baseline of {summary.baseline['night']}: {summary.baseline['headline']}"))
        if summary.baseline["elsewhere"]:
            console.print(Text(f"another machine than the baseline's: {summary.baseline['elsewhere']}", "yellow"))
        for one in differs:
            console.print(Text(f"- {one['because']}"), soft_wrap=True)
    console.print(Text(f"summary: {result.folder / 'summary.html'}"), soft_wrap=True)
