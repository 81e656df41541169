"""A matplotlib figure as inline SVG whose colours follow the page: each ink is a sentinel colour that becomes a CSS variable."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = SimpleNamespace(
    text="#0a0001",
    muted="#0a0002",
    grid="#0a0003",
    surface="#0a0004",
    control="#0a0005",
    fault="#0a0006",
    mitigated="#0a0007",
    warn="#0a0008",
    lane="#0a0009",
    stall="#0a000a",
)
"""What figures draw with. The page defines `--ink-text` and so on, once for light and once for dark."""

_VARIABLES = {color: f"var(--ink-{name})" for name, color in vars(INK).items()}
_SENTINEL = re.compile("|".join(_VARIABLES))
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "{http://www.w3.org/1999/xlink}href"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dtprobe",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 11.0,
    "hatch.linewidth": 1.2,
    "path.simplify": True,
}
_METADATA: Mapping[str, None] = {"Date": None, "Creator": None, "Format": None, "Type": None}


def style() -> dict:
    """The matplotlib settings under which a figure must be both made and written."""
    return dict(_STYLE)


def inline(figure: Figure, name: str, title: str, description: str, notes: Mapping[str, str] | None = None) -> str:
    """The figure as an `<svg>` element to be put into a page: themed, accessible, the same bytes for the same figure.

    `name` makes the element's ids unique in the page. `notes` maps the gid of an artist to a text shown when the pointer
    rests on it. Texts are escaped by the XML writer, whatever they hold.
    """
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata=dict(_METADATA), transparent=True)
    root = ElementTree.fromstring(buffer.getvalue())  # our own writer's output; it declares no entities
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    for defs in root.iter(f"{{{_SVG}}}defs"):
        for sheet in defs.findall(f"{{{_SVG}}}style"):
            defs.remove(sheet)
    _theme(root, name)
    for gid, text in (notes or {}).items():
        for element in root.iter():
            if element.get("id") == f"{name}-{gid}":
                note = ElementTree.Element(f"{{{_SVG}}}title")
                note.text = text
                element.insert(0, note)
    width, height = root.get("viewBox", "0 0 1 1").split()[2:]
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-desc")
    root.set("style", f"aspect-ratio:{float(width):g}/{float(height):g}")
    for index, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(index, element)
    ElementTree.register_namespace("", _SVG)
    text = ElementTree.tostring(root, encoding="unicode")
    return re.sub(r">\s+<", "><", text)


def _theme(root: ElementTree.Element, name: str) -> None:
    """Ids get the figure's name in front, references follow; sentinel colours become variables, fonts the page's own."""
    keep = {reference for element in root.iter() for reference in _references(element)}
    for element in root.iter():
        identity = element.get("id")
        if identity is not None:
            # matplotlib numbers every group; ids that nothing refers to and nobody chose are dead weight
            if identity in keep or not re.fullmatch(r"[A-Za-z]*\d*_\d+", identity):
                element.set("id", f"{name}-{identity}")
            else:
                del element.attrib["id"]
        target = element.attrib.pop(_XLINK, None)
        if target is not None:
            element.set("href", f"#{name}-{target.removeprefix('#')}")
        for attribute in ("style", "fill", "stroke", "clip-path"):
            value = element.get(attribute)
            if value is None:
                continue
            value = re.sub(r"url\(#([^)]*)\)", rf"url(#{name}-\1)", value)
            value = re.sub(r";? ?font-family: [^;]*", "", value)
            element.set(attribute, _SENTINEL.sub(lambda found: _VARIABLES[found.group()], value))


def _references(element: ElementTree.Element) -> list[str]:
    found = [element.get(_XLINK, "").removeprefix("#")]
    for value in element.attrib.values():
        found += re.findall(r"url\(#([^)]*)\)", value)
    return [item for item in found if item]
