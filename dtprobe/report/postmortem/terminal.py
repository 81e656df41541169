"""A diagnosis as a terminal shows it, in 80 columns or piped into a file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from dtprobe.report import words
from dtprobe.report.paragraph import safe, told
from dtprobe.report.postmortem.note import Note

WIDTH = 11
QUOTE = 300
LINES = 8
"""Lines of evidence, moments, waits and rivals; the report has more."""
_STYLES = {"fault": "bold red", "undetermined": "bold yellow", "healthy": "bold green"}
_ROLES = {"cause": "red", "confirm": "cyan", "effect": "dim"}


def render(note: Note, console: Console, folder: Path | None = None) -> None:
    """Prints the answer, how sure it is, its evidence, what was ruled out, what is missing, the fix and the scenario."""
    console.print(safe(note.answer, _STYLES[note.kind]))
    console.print(safe(note.because))
    console.print()
    if note.kind != "undetermined":
        told(console, "confidence", note.confidence, width=WIDTH)
    for text in note.cycles[:2]:
        told(console, "deadlock", text, width=WIDTH)
    for number, text in enumerate(note.wait_sentences[:4]):
        told(console, "" if number else "waits", text, width=WIDTH)
    if note.evidence:
        console.print(Text("evidence", style="bold"))
    for one in note.evidence[:LINES]:
        place = Text(f"  {one.where}", style=_ROLES.get(one.role, "")).append(f"  ({one.meaning})", style="dim")
        console.print(place, soft_wrap=True)
        console.print(Padding(safe(words.clip(one.text, QUOTE)), (0, 0, 0, 4), expand=False))
    _more(console, len(note.evidence) - LINES + note.left_out["evidence"], folder)
    told(console, "not proven", note.not_proven, width=WIDTH)
    for number, rival in enumerate(note.rivals[:LINES]):
        text = f"{rival.mode}{f' ({rival.who})' if rival.who else ''}: {words.clip(rival.because, QUOTE)}"
        told(console, "" if number else "candidates" if note.kind == "undetermined" else "ruled out", text, width=WIDTH)
    for number, text in enumerate(note.missing[:LINES]):
        told(console, "" if number else "missing", text, width=WIDTH, style="yellow")
    _more(console, len(note.missing) - LINES + note.left_out["missing"], folder)
    if note.collect:
        console.print(Text("collect next time", style="bold"))
        for item in note.collect:
            console.print(Padding(safe(f"{item.what}: {item.tells}"), (0, 0, 0, 2), expand=False))
            console.print(Text(f"    {item.how}", style="cyan"), soft_wrap=True)
        console.print(Text("  dtprobe watch -- CMD takes most of this by itself while a job hangs"), soft_wrap=True)
    told(console, "fix", note.fix, width=WIDTH)
    told(console, "reproduce", note.command, width=WIDTH, keep=True)
    told(console, "read", ", ".join(f"{count:,} {kind}" for kind, count in note.read), width=WIDTH, style="dim")
    if folder is not None:
        told(console, "report", str(folder / "report.html"), width=WIDTH, keep=True)


def _more(console: Console, count: int, folder: Path | None) -> None:
    if count > 0:
        console.print(Text(f"  and {count} more{' in the report' if folder is not None else ''}", style="dim"))
