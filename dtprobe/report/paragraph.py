"""Paragraphs on a terminal: text from elsewhere is never markup, and a path stays in one piece."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtprobe.report import words


def told(console: Console, label: str, text: Any, *, keep: bool = False, style: str = "", width: int = 8) -> None:
    """A labelled paragraph, nothing where there is no text; `keep` leaves a path unbroken, so that it can be copied."""
    if not text:
        return
    if keep:
        console.print(Text.assemble((f"{label:<{width}}", "bold"), words.clip(text, 4000)), soft_wrap=True)
        return
    table = Table.grid(padding=0)
    table.add_column(width=width, no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    table.add_row(Text(label, style="bold"), safe(text, style))
    console.print(table)


def safe(text: Any, style: str = "") -> Text:
    """Text from elsewhere: no markup, control characters made visible, at most 4,000 characters."""
    return Text(words.clip(text, 4000), style=style)
