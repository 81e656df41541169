"""What a worker says about itself: one JSON line an observation, in the artifact that the `events` reader reads.

Imports the standard library only, so that a worker pays nothing for it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

RANK_FOLDER = "DTPROBE_RANK_FOLDER"
"""Environment variable: where this rank's artifacts go. Unset outside the harness."""


def record(kind: str, *, environ: Mapping[str, str] = os.environ, **fields: str | float | bool | None) -> None:
    """Append an observation `kind` with its fields to this rank's `events.jsonl`, with the time, rank, pid and thread.

    Fields are plain scalars. Outside the harness the line goes to standard error. The line is written at once and whole
    (one `write` to a file opened for appending), so that what a killed rank said before is kept.
    """
    rank = environ.get("RANK")
    line = {
        "t_ns": time.time_ns(),
        "kind": kind,
        "rank": int(rank) if rank is not None and rank.isdigit() else None,
        "pid": os.getpid(),
        "tid": threading.get_native_id(),
        **fields,
    }
    text = json.dumps(line, allow_nan=True) + "\n"
    folder = environ.get(RANK_FOLDER)
    if folder is None:
        sys.stderr.write(text)
        return
    with Path(folder, "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(text)
