"""py-spy's dumps of Python stacks, as JSON or text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from dtprobe.readers.artifact import Problems, ReaderError, rank_of, read_text
from dtprobe.readers.pyspy_threads import from_json, from_text
from dtprobe.readers.schema import Schema
from dtprobe.readers.threads import Thread

SCHEMA = Schema(
    "stacks",
    {
        "thread_name": "string",
        "active": "boolean",
        "owns_gil": "boolean",
        "top": "string",
        "frames": "string",
        "digest": "string",
        "locals": "string",
    },
)
"""`kind` is "stack", one row a thread. `frames` are innermost first, as "func (file:line)" separated by ";" (a native frame has its
library for a file), `top` is the first. `digest` is equal for stacks of equal functions and files, whatever the lines.
`locals` is what `--locals` printed, one variable a line. `tid` is the system's number, null where only pthread's is known.
`t_ns` is the file's own time: the dump does not bear one."""

LIMIT = 64 << 20


def read_pyspy(path: Path, rank: int | None = None, problems: Problems | None = None, *, dated: bool = True) -> pd.DataFrame:
    """One dump (`py-spy dump`, with `--json`, `--locals`, `--native`, `--subprocesses` or not) as `stacks`.

    `rank` defaults to the name's. `dated` false leaves `t_ns` null: for files that were copied about. Raises ReaderError.
    """
    text = read_text(path, LIMIT, problems)
    is_json = text.lstrip()[:1] in ("[", "{")
    taken = from_json(path, text, problems) if is_json else from_text(enumerate(text.splitlines(), 1))
    threads = [thread for process in taken for thread in process.threads]
    if not threads:
        raise ReaderError(f"{path} is not a py-spy dump: it has no thread", "py-spy dump [--json] --pid PID > FILE")
    return stacks(threads, path, rank, path.stat().st_mtime_ns if dated else None)


def stacks(threads: Sequence[Thread], path: Path, rank: int | None, t_ns: int | None) -> pd.DataFrame:
    """The frame of some threads."""
    return SCHEMA.frame(
        {
            "t_ns": [t_ns for _ in threads],
            "rank": rank if rank is not None else rank_of(path, r"stack\.\w+\.([0-9]{1,7})$"),
            "pid": [one.pid for one in threads],
            "tid": [one.tid for one in threads],
            "source": str(path),
            "kind": "stack",
            "thread_name": [one.name for one in threads],
            "active": [one.active for one in threads],
            "owns_gil": [one.owns_gil for one in threads],
            "top": [one.frames[0] if one.frames else None for one in threads],
            "frames": [";".join(one.frames) if one.frames else None for one in threads],
            "digest": [digest(one.frames) if one.frames else None for one in threads],
            "locals": ["\n".join(one.locals) if one.locals else None for one in threads],
        }
    )


def digest(frames: Sequence[str]) -> str:
    """Eight letters that are equal for stacks of the same functions in the same files. Line numbers do not count."""
    return hashlib.blake2s(
        "\n".join(re.sub(r":\d+\)$", ")", one) for one in frames).encode("utf-8", "replace"), digest_size=4
    ).hexdigest()
