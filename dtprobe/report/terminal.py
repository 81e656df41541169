"""Answers as a terminal shows them: a run's verdict, the runs there are, the doctor's findings, and how far a run is.

Everything printed from a run folder or a machine is text, never markup: a worker's message may hold brackets and escapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dtprobe.doctor.host import Missing
from dtprobe.errors import DtprobeError, Unavailable
from dtprobe.report import words
from dtprobe.report.page import NO_VERDICT, VERDICTS
from dtprobe.report.paragraph import safe, told
from dtprobe.scenario import ARMS
from dtprobe.store import Listed, RunFolder

if TYPE_CHECKING:
    from dtprobe.doctor import Answer, DoctorReport

_STYLES = {"reproduced": "green", "partly": "green", "refuted": "green", "not-reproduced": "yellow", "unsupported": "yellow"}
_CURES = {"held": "the cure held", "failed": "the cure failed", "none": "no cure was run"}


class Steps:
    """Progress of a run: a bar on a terminal, one line a step elsewhere (a log file, CI)."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._title, self._steps, self._done = "", 0, 0

    def begin(self, title: str, steps: int) -> None:
        self._title, self._steps, self._done = title, steps, 0
        if self._console.is_terminal:
            columns = (TextColumn("{task.fields[title]}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            what = TextColumn("{task.description}", markup=False)
            self._bar = Progress(*columns, what, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=steps, title=title)

    def step(self, what: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=words.clip(what, 60))
        else:
            self._console.print(safe(f"{self._title} [{self._done + 1}/{self._steps}] {what}"), soft_wrap=True)
        self._done += 1

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def render_verdict(run_folder: Path, console: Console) -> None:
    """Prints a run: verdict, why, arms with intervals, the recorders' cost, what was unavailable, where the report lies.

    A run without verdict is said to be running, interrupted or killed, with what it had done. Raises DtprobeError where
    `run.json` or `verdict.json` is damaged.
    """
    run = RunFolder.open(run_folder)
    verdict = run.verdict()
    facts = run.facts
    console.print(_headline(run, verdict))
    title = (facts.get("scenario_text") or {}).get("title")
    if title:
        console.print(safe(title, "bold"))
    if run.state != "finished":
        console.print(safe(_progress(run), style="yellow"))
    if verdict is not None:
        told(console, "claim", verdict.get("claim"))
        told(console, "found", verdict.get("because"))
        if verdict.get("metrics"):
            console.print()
            console.print(_arms(verdict["metrics"]))
            console.print()
        told(console, "cure", _cure(verdict, facts))
        told(console, "cost", _cost(verdict.get("overhead") or {}))
    for name, why in (facts.get("unavailable") or {}).items():
        told(console, "without", f"{name}: {Unavailable(str(why.get('reason', '')), str(why.get('remedy', '')))}")
    report = run.path / "report.html"
    if report.exists():
        told(console, "report", str(report), keep=True)
    else:
        told(console, "folder", str(run.path), keep=True)


def render_runs(listed: Iterable[Listed], console: Console) -> None:
    """Prints a table of runs, newest first: when, which scenario, its state or verdict, and its id. Damaged ones are named."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("started (UTC)", "scenario", "state", "verdict", "expected", "run"):
        table.add_column(name, overflow="fold")
    damaged = []
    for entry in listed:
        if entry.run is None:
            damaged.append(entry)
            continue
        table.add_row(*(safe(cell, style) for cell, style in _row(entry.run)))
    if table.row_count:
        console.print(table)
    for entry in damaged:
        console.print(safe(f"damaged: {entry.problem}", "red"))
    if not table.row_count and not damaged:
        console.print(Text("no runs yet: dtprobe run NAME makes one, dtprobe list names the scenarios"))


def render_doctor(report: DoctorReport, console: Console) -> None:
    """Prints the doctor's findings: scenarios, capabilities, and the lines that would install all that packages can cure."""
    if report.scenarios:
        able = sum(answer.runnable for answer in report.scenarios)
        table = _findings_table("scenario", f"{able} of {len(report.scenarios)} scenarios run here")
        for answer in report.scenarios:
            reasons = [f"{unmet.name}: {unmet.unavailable}" for unmet in answer.unmet]
            reasons += [f"without {name}: {why}" for name, why in answer.without.items()] if answer.runnable else []
            mark = _mark(answer.runnable, "with less" if answer.without else "yes")
            table.add_row(safe(answer.scenario), mark, safe("\n".join(reasons)))
        console.print(table)
    have = sum(answer.unavailable is None for answer in report.capabilities)
    table = _findings_table("capability", f"{have} of {len(report.capabilities)} capabilities")
    for capability in report.capabilities:
        why = capability.unavailable
        text = safe(capability.summary, "dim") if why is None else safe(why)
        table.add_row(safe(capability.name), _mark(why is None, "yes"), text)
    console.print(table)
    families = ", ".join(f"{family.example} ({family.summary})" for family in report.families)
    console.print(Text(f"with an argument: {families}", style="dim"))
    remedy = _install_lines(report)
    if remedy:
        console.print(Text("packages would bring what is missing, in so far as packages can:"))
        for line in remedy.split(" && "):
            console.print(Text(f"  {line}"), soft_wrap=True)


def _install_lines(report: DoctorReport) -> str:
    answers: list[Answer] = [*report.capabilities, *(unmet for answer in report.scenarios for unmet in answer.unmet)]
    missing = [answer.unavailable for answer in answers if isinstance(answer.unavailable, Missing)]
    return Missing.all(missing).remedy if missing else ""


def _findings_table(what: str, title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="bold")
    table.add_column(what, overflow="fold")
    table.add_column("here", no_wrap=True)
    table.add_column("why not, and what helps", overflow="fold", ratio=1)
    return table


def _mark(good: bool, word: str) -> Text:
    return Text(word, style="green" if word == "yes" else "yellow") if good else Text("no", style="red")


def _headline(run: RunFolder, verdict: Mapping[str, Any] | None) -> Text:
    kind = str((verdict or {}).get("verdict") or "")
    badge, _ = VERDICTS.get(kind, NO_VERDICT)
    text = Text.assemble(
        (words.clip(run.scenario, 120), "bold"), "  ", (f" {badge} ", f"reverse {_STYLES.get(kind, 'red')}"), "  "
    )
    if verdict is not None:
        expected = verdict.get("expected")
        if expected is None:
            text.append("nothing was pinned")
        elif verdict.get("as_expected"):
            text.append("as expected", style="green")
        else:
            text.append_text(safe(f"expected: {expected}", "bold red"))
    torch = (verdict or {}).get("torch") or (run.facts.get("versions") or {}).get("torch")
    told = [
        _when(run.facts.get("started_ns")),
        f"seed {run.facts.get('seed')}",
        f"torch {torch}" if torch else "no torch",
        run.id,
    ]
    return text.append("\n").append_text(safe(" . ".join(told), "dim"))


def _progress(run: RunFolder) -> str:
    done = [f"{one.get('arm')}/{one.get('repeat')}" for one in run.facts.get("arm_runs") or [] if isinstance(one, dict)]
    so_far = f"arm runs done: {words.listed(done)}" if done else "no arm run was done"
    if run.state == "interrupted":
        return f"interrupted by its user; {so_far}"
    if run.running():
        return f"still running; {so_far}"
    text = f"unfinished: its harness ended before the run did; {so_far}. dtprobe doctor --leftovers shows what it may have left"
    earlier = _last_finished(run)
    return f"{text}. The last finished run of this scenario is {earlier}" if earlier else text


def _last_finished(run: RunFolder) -> str | None:
    for folder in sorted(run.path.resolve().parent.iterdir(), reverse=True):
        try:
            other = RunFolder.open(folder)
        except DtprobeError:
            continue
        if other.state == "finished":
            return other.id
    return None


def _arms(metrics: Mapping[str, Mapping[str, Any]]) -> Table:
    """Metrics by arms. The document's figure stands beside ours where it gives one."""
    documented = any(metric.get("documented") for metric in metrics.values())
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("metric", overflow="fold")
    if documented:
        table.add_column("documented", overflow="fold")
    for arm in ARMS:
        table.add_column(arm, overflow="fold")
    for name, metric in metrics.items():
        cells = [safe(name), *([safe(metric.get("documented") or "")] if documented else [])]
        for arm in ARMS:
            cells.append(_cell(metric, arm))
        table.add_row(*cells)
    return table


def _cell(metric: Mapping[str, Any], arm: str) -> Text:
    unit = str(metric.get("unit") or "")
    value = metric.get(arm)
    if value is None:
        return Text("-", style="dim")
    low, high = (metric.get("intervals") or {}).get(arm) or (None, None)
    n = (metric.get("n") or {}).get(arm)
    spread = words.interval(low, high, unit)
    notes = ", ".join(filter(None, (spread, f"n={n}" if n is not None else "")))
    return safe(words.number(value, unit), "bold").append_text(safe(f" ({notes})" if notes else "", "dim"))


def _cure(verdict: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    mitigation = str(verdict.get("mitigation") or "none")
    text = _CURES.get(mitigation, mitigation)
    why = (facts.get("scenario_text") or {}).get("no_cure_because")
    return f"{text}: {why}" if mitigation == "none" and why else text


def _cost(overhead: Mapping[str, Mapping[str, Any]]) -> str:
    parts = []
    for probe, cost in overhead.items():
        ratio, low, high = (cost.get(key) for key in ("ratio", "low", "high"))
        if ratio is None:
            continue
        spread = f" ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} %)" if low is not None and high is not None else ""
        parts.append(f"{probe} {100 * (ratio - 1):+.1f} %{spread}, n={cost.get('n')}")
    return f"of the worker's time: {'; '.join(parts)}" if parts else ""


def _row(run: RunFolder) -> list[tuple[str, str]]:
    try:
        verdict = run.verdict() or {}
    except DtprobeError as error:
        verdict = {"verdict": f"damaged: {error.message}"}
    kind = str(verdict.get("verdict") or "")
    state = "running" if run.state == "unfinished" and run.running() else run.state
    expected = (
        ""
        if not verdict or verdict.get("expected") is None
        else "yes"
        if verdict.get("as_expected")
        else f"no: {verdict['expected']}"
    )
    return [
        (_when(run.facts.get("started_ns")), ""),
        (run.scenario, ""),
        (state, "" if state == "finished" else "yellow"),
        (kind or "-", _STYLES.get(kind, "red" if kind else "dim")),
        (expected, "red" if expected.startswith("no") else ""),
        (run.id, "dim"),
    ]


def _when(ns: Any) -> str:
    return f"{datetime.fromtimestamp(ns / 1e9, UTC):%Y-%m-%d %H:%M:%S}" if isinstance(ns, int) else "start unknown"
