"""The folder of a postmortem: `<out>/postmortem/<utc-time>-<id>/{diagnosis.json,report.html,report.md,timeline.json}`, whole or absent."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from dtprobe.diagnose.diagnosis import Diagnosis
from dtprobe.report.postmortem import note, page, trace
from dtprobe.store.files import plain, sync_folder, writing
from dtprobe.store.runs import HALF_MADE, POSTMORTEMS, run_id, sweep


def write(diagnosis: Diagnosis, out: Path, *, subject: Sequence[str] = (), now_ns: int, token: str | None = None) -> Path:
    """Write a new folder below `out` and answer its path. `subject` are the paths that were looked at.

    It appears under its name with all its files or not at all, whatever interrupts. Raises DtprobeError where it cannot be written.
    """
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
