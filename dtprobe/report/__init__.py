"""Reports: a run folder in, one HTML page, its Markdown and a Perfetto trace out.

`write` is all that others need. It reads the run folder only, so a report can be made again at any time.
"""

from __future__ import annotations

import os
from pathlib import Path

from dtprobe.errors import DtprobeError


def write(run_folder: Path) -> Path:
    """Write `report.html`, `report.md` and `trace.json` into a run folder; answers the path of the page.

    Works for every verdict, for unfinished runs, and where arms, frames or artifacts are missing. Raises DtprobeError where
    the folder holds no readable `run.json`, or cannot be written to.
    """
    from dtprobe.report import html, load, markdown, page, trace

    folder = load.load(Path(run_folder))
    content = page.build(folder)
    try:
        trace.write(folder, folder.path / "trace.json")
        _replace(folder.path / "report.md", markdown.render(content))
        return _replace(folder.path / "report.html", html.render(content))
    except OSError as error:
        raise DtprobeError(
            f"cannot write the report into {folder.path}: {error.strerror}", "free space or permit writing"
        ) from error


def _replace(path: Path, text: str) -> Path:
    """Write a file so that a reader sees the old one or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8", errors="replace")
    partial.replace(path)
    return path
