"""What a worker says about itself: one JSON line an observation, in the artifact that the `events` reader reads.

Imports the standard library only, so that a worker pays nothing for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

RANK_FOLDER = "DTPROBE_RANK_FOLDER"
"""Environment variable: where this rank's artifacts go. Unset outside the harness."""

TEXT_LENGTH = 2000
"""Of an exception's text, so much is recorded."""

_numbers = itertools.count()


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


@dataclass
class Attempt:
    """A try: `error` and `text` are the type and the text of what it raised once it has ended, empty where it raised nothing."""

    fields: dict[str, str | float | bool | None] = field(default_factory=dict)
    error: str = ""
    text: str = ""

    def note(self, **fields: str | float | bool | None) -> None:
        """Add fields to what is recorded at the end."""
        self.fields.update(fields)


@contextlib.contextmanager
def attempt(what: str, *, environ: Mapping[str, str] = os.environ, **fields: str | float | bool | None) -> Iterator[Attempt]:
    """Try the block and record how it ended; an Exception that it raises is recorded and goes no further.

    Two observations: `begun`, so that a try in which the rank hangs or dies is seen, and `attempt` with `took_s`, the
    exception's type `error` and its `text` (both empty where none was raised), and the fields. `dtprobe.authoring.symptoms.attempts` reads both.
    """
    number = next(_numbers)
    record("begun", environ=environ, what=what, **{"try": number})
    made = Attempt(dict(fields))
    began = time.perf_counter()
    try:
        yield made
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what the try found
        made.error, made.text = type(error).__name__, str(error)[:TEXT_LENGTH]
    took_s = time.perf_counter() - began
    record(
        "attempt",
        environ=environ,
        what=what,
        took_s=took_s,
        error=made.error,
        text=made.text,
        **{**made.fields, "try": number},
    )


def together(ranks: int, *, patience_s: float, mark: str = "here", environ: Mapping[str, str] = os.environ) -> bool:
    """Wait until `ranks` ranks of this arm run have come to this call with this `mark`; False after `patience_s`, or outside the harness.

    By files beside the ranks' artifacts, so that it works before, without and after the network that a worker tries out: the time
    that the import of torch takes is then no part of a deadline.
    """
    folder = environ.get(RANK_FOLDER)
    if folder is None:
        return False
    Path(folder, f"came-{mark}").touch()
    deadline = time.monotonic() + patience_s
    while sum(1 for _ in Path(folder).parent.glob(f"rank*/came-{mark}")) < ranks:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
