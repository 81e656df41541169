"""The note as one HTML file (no outside asset, no script, dark and light, phone and paper) and as Markdown for an issue or a chat."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from markupsafe import Markup

from dtprobe.report import engine, markdown, words
from dtprobe.report.postmortem import lanes_picture, wait_picture
from dtprobe.report.postmortem.note import Note


def html(note: Note, *, subject: Sequence[str] = (), made_ns: int) -> str:
    """The page. `subject` are the paths that were looked at, `made_ns` when, in UTC nanoseconds."""
    return (
        engine.for_html()
        .get_template("postmortem.html.j2")
        .render(note=note, draw=_Pictures(note), subject=_subject(subject), made=_when(made_ns))
    )


def text(note: Note, *, subject: Sequence[str] = (), made_ns: int) -> str:
    """The same in Markdown."""
    template = engine.for_markdown().get_template("postmortem.md.j2")
    return markdown.tidy(template.render(note=note, subject=_subject(subject), made=_when(made_ns)))


class _Pictures:
    """Draws when the template asks."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def timeline(self, size: str) -> Markup:
        width = lanes_picture.NARROW if size == "narrow" else lanes_picture.WIDE
        return lanes_picture.draw(self._note.timeline, width, f"timeline-{size}")

    def waits(self) -> Markup:
        return wait_picture.draw(self._note.waits) if self._note.waits else Markup()


def _subject(paths: Sequence[str]) -> str:
    return words.listed([words.clip(path, 120) for path in paths], 4)


def _when(t_ns: int) -> str:
    return f"{datetime.fromtimestamp(t_ns // 10**9, UTC):%Y-%m-%d %H:%M:%S} UTC"
