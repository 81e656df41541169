"""A matrix as a page, as Markdown and on the terminal: scenarios by cells, what changed between them, and what could not be had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtprobe.errors import DtprobeError
from dtprobe.report import engine, words

PAGE = "matrix.html"
MARKDOWN = "matrix.md"
UP = "../../"
TONES = {
    "as-expected": "good",
    "not-as-expected": "bad",
    "broken": "bad",
    "failed": "bad",
    "flaky": "warn",
    "not-run": "warn",
    "left-out": "calm",
    "unsupported": "calm",
}
STATES = {"done": "good", "failed": "bad", "unsupported": "calm"}
STYLES = {"good": "green", "bad": "bold red", "warn": "yellow", "calm": "dim"}


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a scenario came to in a cell; `text` is empty where the cell did not run it."""

    text: str
    tone: str
    hint: str
    folder: str


@dataclass(frozen=True, kw_only=True)
class Column:
    """A cell that ran, by what varies."""

    id: str
    head: tuple[str, ...]
    night: str


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """What the templates print."""

    headline: str
    began: str
    well: bool
    interrupted: bool
    matrix: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, str, tuple[Shown, ...]], ...]
    changes: tuple[Mapping[str, Any], ...]
    absent: tuple[Mapping[str, Any], ...]
    counts: tuple[tuple[str, int, str], ...]
    """Of each state that a cell is in, how many are, and their tone."""
    facts: tuple[tuple[str, str], ...]


def build(data: Mapping[str, Any]) -> Sheet:
    """The content, from a matrix.json."""
    cells = data["cells"]
    ran = [one for one in cells if one["state"] == "done"]
    absent = [one for one in cells if one["state"] != "done"]
    columns = tuple(Column(id=one["id"], head=tuple(_head(one)), night=one["night"]) for one in ran)
    rows = tuple(
        (row["scenario"], row["title"], tuple(_shown(row["cells"].get(one.id)) for one in columns)) for row in data["scenarios"]
    )
    changed = sorted({one["scenario"] for one in data["changes"]})
    say = [f"{len(ran)} of {len(cells)} cells ran", f"{len(changed)} of {len(rows)} scenarios change between them"]
    unsupported = sum(one["state"] == "unsupported" for one in cells)
    say += [f"{unsupported} cannot be had here"] if unsupported else []
    took = {"cells": sum(one["took_s"] for one in cells), "building venvs": sum(one["built_s"] or 0 for one in cells)}
    installers = sorted({one["installer"] for one in ran if one["installer"]})
    facts = {name: words.number(value, "s") for name, value in took.items()} | {
        "installed by": ", ".join(installers) or "nobody"
    }
    return Sheet(
        headline="; ".join(say),
        began=datetime.fromtimestamp(data["began_ns"] / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        well=data["well"],
        interrupted=data["interrupted"] or not data["ended"],
        matrix=data["matrix"],
        columns=columns,
        rows=rows,
        changes=tuple(data["changes"]),
        absent=tuple(absent),
        counts=tuple((state, n, STATES.get(state, "warn")) for state, n in Counter(one["state"] for one in cells).items()),
        facts=tuple(facts.items()),
    )


def write(folder: Path, data: Mapping[str, Any]) -> Path:
    """Write matrix.html and matrix.md beside matrix.json; answers the page's path."""
    sheet = build(data)
    page = folder / PAGE
    try:
        page.write_text(engine.for_html().get_template("matrix.html.j2").render(sheet=sheet, up=UP), encoding="utf-8")
        text = engine.for_markdown().get_template("matrix.md.j2").render(sheet=sheet)
        (folder / MARKDOWN).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DtprobeError(f"cannot write the pages into {folder}: {error.strerror}", "free space") from error
    return page


def render(data: Mapping[str, Any], console: Console) -> None:
    """The end of a matrix on the terminal: the table, the changes, and what could not be had. Of the history the changes alone."""
    if "cells" in data:
        sheet = build(data)
        console.print(Text(sheet.headline, "bold green" if sheet.well else "bold red"))
        if sheet.columns:
            table = Table(box=None, pad_edge=False, header_style="bold")
            table.add_column("scenario", overflow="fold")
            for column in sheet.columns:
                table.add_column("\n".join(column.head), overflow="fold")
            for scenario, _, shown in sheet.rows:
                table.add_row(Text(scenario), *(Text(one.text or "-", STYLES.get(one.tone, "")) for one in shown))
            console.print(table)
        for one in sheet.absent:
            why = "; ".join(filter(None, (one["reason"], one["remedy"])))
            console.print(Text(": ".join(filter(None, (one["id"], one["state"], why))), "yellow"), soft_wrap=True)
    for one in data["changes"]:
        console.print(Text(f"{one['scenario']}: {one['words']} ({one['because']})"), soft_wrap=True)
    if not data["changes"]:
        console.print("no verdict and no cure changes between what was run")


def _head(cell: Mapping[str, Any]) -> list[str]:
    own = cell["cell"]
    torch = "no torch" if cell["torch"] == "none" else f"torch {cell['torch']}"
    sizes = [] if own["world_size"] is None else [f"{own['world_size']} ranks"]
    return [torch, f"Python {cell['python']}", *sizes, *([] if own["launcher"] is None else [own["launcher"]])]


def _shown(found: Mapping[str, Any] | None) -> Shown:
    if found is None:
        return Shown(text="", tone="calm", hint="not run in this cell", folder="")
    status, verdict = found["status"], found["verdict"]
    text = verdict or status
    if status in ("flaky", "broken"):
        text = f"{status}: {verdict} in one of {found['runs']}"
    if found["mitigation"] == "failed":
        text += ", cure failed"
    return Shown(text=text, tone=TONES.get(status, "bad"), hint=f"{status}: {found['because']}", folder=found["folder"])
