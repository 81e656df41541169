"""A diagnosis for people: on the terminal, as an incident note in HTML and Markdown, as a timeline that Perfetto opens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from dtprobe.diagnose.diagnosis import Diagnosis


def render(diagnosis: Diagnosis, console: Console, folder: Path | None = None) -> None:
    """Print the answer. `folder` is the one that `write` made, None where none was."""
    from dtprobe.report.postmortem import note, terminal

    terminal.render(note.of(diagnosis), console, folder)


def write(diagnosis: Diagnosis, out: Path, *, subject: Sequence[str] = (), now_ns: int, token: str | None = None) -> Path:
    """Write `<out>/postmortem/<utc-time>-<id>/` with diagnosis.json, report.html, report.md and timeline.json; answers its path.

    `subject` are the paths that were looked at. The folder is whole or absent. Raises DtprobeError where it cannot be written.
    """
    from dtprobe.report.postmortem import folder

    return folder.write(diagnosis, out, subject=subject, now_ns=now_ns, token=token)


def require(out: Path) -> None:
    """Raise UsageError where nothing can be written below `out`: that is better known before the work than after it."""
    from dtprobe.store.files import require_folder

    require_folder(out)
