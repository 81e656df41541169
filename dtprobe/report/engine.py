"""The template engines that every report is printed with: one escapes for HTML, one for Markdown."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dtprobe.catalog import PACKAGE
from dtprobe.report import words

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~&])")


def templates() -> Path:
    """The folder of the templates: the checkout's, or the one that the wheel carries."""
    checkout = PACKAGE.parent / "reports" / "templates"
    return checkout if checkout.is_dir() else PACKAGE / "content" / "reports" / "templates"


@cache
def for_html() -> Environment:
    """The template engine for HTML: escapes every value, fails on a name that does not exist. It keeps what it has compiled."""
    engine = Environment(
        loader=FileSystemLoader(templates()),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    engine.filters["commits"] = commits
    engine.filters["href"] = href
    engine.filters["listed"] = words.listed
    engine.filters["number"] = words.number
    return engine


def href(path: str) -> str:
    """A path in the run folder as a relative link. The leading `./` keeps a file name with a colon from being a scheme."""
    return f"./{quote(path)}"


def commits(span: str) -> str:
    """A commit, or two with `..` between them, in the short form."""
    return "..".join(commit[:10] for commit in span.split(".."))


class _Ready(str):
    """Text that is Markdown already."""

    __slots__ = ()


@cache
def for_markdown() -> Environment:
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


def _literal(value: Any) -> str:
    if isinstance(value, _Ready):
        return str(value)
    return _SPECIAL.sub(r"\\\1", " ".join(str(value).split()))
