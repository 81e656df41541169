"""The folder of a postmortem: `<out>/postmortem/<utc-time>-<id>/{diagnosis.json,report.html,report.md,timeline.json}`, whole or absent."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtprobe.store.files import plain, read_json, sync_folder, writing
from dtprobe.store.runs import HALF_MADE, POSTMORTEMS, RUN_ID, run_id, sweep

if TYPE_CHECKING:
    from dtprobe.diagnose.diagnosis import Diagnosis


def write(diagnosis: Diagnosis, out: Path, *, subject: Sequence[str] = (), now_ns: int, token: str | None = None) -> Path:
    """Write a new folder below `out` and answer its path. `subject` are the paths that were looked at.

    It appears under its name with all its files or not at all, whatever interrupts. Raises DtprobeError where it cannot be written.
    """
    from dtprobe.report.postmortem import note, page, trace  # not needed to find a folder, and slow

    told = note.of(diagnosis)
    texts = {
        "diagnosis.json": json.dumps(plain(diagnosis.json), indent=2, allow_nan=False) + "\n",
        "report.html": page.html(told, subject=subject, made_ns=now_ns),
        "report.md": page.text(told, subject=subject, made_ns=now_ns),
        "timeline.json": trace.render(diagnosis),
    }
    parent = out / POSTMORTEMS
    path = parent / run_id(now_ns, token or secrets.token_hex(4))
    half_made = parent / f"{HALF_MADE}{path.name}"
    with writing(path):
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent, now_ns)
        try:
            half_made.mkdir()
            for name, text in texts.items():
                (half_made / name).write_text(text, encoding="utf-8", errors="replace")
            half_made.rename(path)
            sync_folder(parent)
        except BaseException:
            shutil.rmtree(half_made, ignore_errors=True)
            raise
    return path


def find(reference: str, out: Path) -> Path | None:
    """The folder of a postmortem that `reference` means: a path, or an id below `out` or the beginning of one; None for none."""
    if (Path(reference) / "diagnosis.json").is_file():
        return Path(reference)
    if not re.fullmatch(r"[0-9TZa-f-]{4,}", reference):
        return None
    ids = [path for path in (out / POSTMORTEMS).glob("*/") if RUN_ID.fullmatch(path.name)]
    found = [path for path in ids if path.name.startswith(reference) or path.name.partition("-")[2].startswith(reference)]
    return found[0] if len(found) == 1 else None


def read(path: Path) -> Diagnosis:
    """The diagnosis in a postmortem's folder. Raises DtprobeError where it is damaged."""
    from dtprobe.diagnose.diagnosis import parsed

    return parsed(read_json(path / "diagnosis.json"))
