"""The page as Markdown, for a pull request or a terminal: the same words, pictures replaced by what they show."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dtprobe.report import engine

if TYPE_CHECKING:
    from dtprobe.report.page import Page


def render(page: Page) -> str:
    """The whole document."""
    return tidy(engine.for_markdown().get_template("run.md.j2").render(page=page))


def tidy(text: str) -> str:
    """The document without the runs of empty lines that templates leave, and with one line end at its end."""
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
