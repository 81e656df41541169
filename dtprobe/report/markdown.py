"""The page as Markdown, for a pull request or a terminal: the same words, pictures replaced by what they show."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dtprobe.report import words
from dtprobe.report.html import templates
from dtprobe.report.page import Page

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~&])")


class _Ready(str):
    """Text that is Markdown already."""

    __slots__ = ()


def environment() -> Environment:
    """The template engine for Markdown: every value is made literal on one line, so that it cannot become markup."""
    engine = Environment(
        loader=FileSystemLoader(templates()),
        autoescape=False,  # finalize does it: HTML escapes are the wrong ones here
        undefined=StrictUndefined,
        finalize=_literal,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    engine.filters["code"] = code
    engine.filters["listed"] = words.listed
    engine.filters["ready"] = _Ready
    return engine


def code(value: Any) -> str:
    """A code span on one line, fenced by more backticks than the text holds."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return _Ready(f"{fence}{pad}{text}{pad}{fence}")


def render(page: Page) -> str:
    """The whole document."""
    text = environment().get_template("run.md.j2").render(page=page)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, _Ready):
        return str(value)
    return _SPECIAL.sub(r"\\\1", " ".join(str(value).split()))
