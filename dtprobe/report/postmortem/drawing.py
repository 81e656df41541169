"""Inline SVG, drawn element by element: the colours are the page's own variables, every text is escaped by the XML writer."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from xml.etree import ElementTree

from markupsafe import Markup

from dtprobe.report import words

_SVG = "http://www.w3.org/2000/svg"
EM = 0.62
"""Width of a common character, in parts of the font's size; wide ones of East Asia take twice as much."""


def fit(text: str, width: float, size: float) -> str:
    """The text cut to `width` pixels at this font size."""
    room = width / (size * EM)
    shown = words.clip(text, 400)
    if _cells(shown) <= room:
        return shown
    kept = ""
    for character in shown:
        if _cells(kept + character) > room - 2:
            break
        kept += character
    return f"{kept.rstrip()}.."


def _cells(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


class Canvas:
    """One picture. `name` makes its ids unique in the page; `ink` is the name of a colour (`fault`, `muted`, ...)."""

    def __init__(self, width: float, height: float, name: str, title: str, description: str) -> None:
        self.name = name
        self.width = width
        self._root = ElementTree.Element(
            "svg",
            {
                "viewBox": f"0 0 {width:g} {height:g}",
                "role": "img",
                "aria-labelledby": f"{name}-title {name}-desc",
                "style": f"aspect-ratio:{width:g}/{height:g};max-width:{width:g}px",
            },
        )
        for tag, text in (("title", title), ("desc", description)):
            ElementTree.SubElement(self._root, tag, {"id": f"{name}-{tag}"}).text = words.clip(text, 2000)

    def heads(self, *inks: str) -> None:
        """Define an arrow head in each of these colours."""
        definitions = ElementTree.SubElement(self._root, "defs")
        for ink in inks:
            head = ElementTree.SubElement(
                definitions,
                "marker",
                {
                    "id": f"{self.name}-head-{ink}",
                    "viewBox": "0 0 8 8",
                    "refX": "7.5",
                    "refY": "4",
                    "markerWidth": "7",
                    "markerHeight": "7",
                    "orient": "auto-start-reverse",
                },
            )
            ElementTree.SubElement(head, "path", {"d": "M0 0L8 4L0 8z", "style": f"fill:var(--ink-{ink})"})

    def path(
        self, d: str, *, stroke: str = "", fill: str = "", width: float = 1.5, dash: str = "", head: str = "", note: str = ""
    ) -> None:
        style = f"fill:{_ink(fill)};stroke:{_ink(stroke)};stroke-width:{width:g}"
        attributes = {"d": d, "style": f"{style};stroke-dasharray:{dash}" if dash else style}
        if head:
            attributes["marker-end"] = f"url(#{self.name}-head-{head})"
        self._note(ElementTree.SubElement(self._root, "path", attributes), note)

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str = "", stroke: str = "", line: float = 1.5, round_: float = 0, dash: str = "", note: str = ""
    ) -> None:  # fmt: skip
        style = f"fill:{_ink(fill)};stroke:{_ink(stroke)};stroke-width:{line:g}"
        attributes = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}", "rx": f"{round_:g}"}
        attributes["style"] = f"{style};stroke-dasharray:{dash}" if dash else style
        self._note(ElementTree.SubElement(self._root, "rect", attributes), note)

    def text(
        self, x: float, y: float, text: str, *, size: float = 12, ink: str = "text", bold: bool = False, anchor: str = "start", room: float | None = None
    ) -> None:  # fmt: skip
        """A text whose baseline begins at (x, y), cut to `room` pixels; the whole of it is its note then."""
        shown = words.clip(text, 400) if room is None else fit(text, room, size)
        style = f"fill:{_ink(ink)};font-size:{size:g}px;font-weight:{650 if bold else 400};text-anchor:{anchor}"
        element = ElementTree.SubElement(
            self._root,
            "text",
            {"x": f"{x:.1f}", "y": f"{y:.1f}", "style": style, "direction": "ltr", "unicode-bidi": "isolate"},
        )
        element.text = shown
        if shown != text:
            ElementTree.SubElement(element, "title").text = words.clip(text, 400)

    def markup(self) -> Markup:
        """The picture, to be put into a page."""
        return Markup(ElementTree.tostring(self._root, encoding="unicode"))

    def _note(self, element: ElementTree.Element, note: str) -> None:
        if note:
            ElementTree.SubElement(element, "title").text = words.clip(note, 600)


def _ink(name: str) -> str:
    return f"var(--ink-{name})" if name else "none"


def polyline(points: Sequence[tuple[float, float]]) -> str:
    """The path through these points."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
