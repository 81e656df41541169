"""Samples of /proc that the `proc` recorder wrote: one JSON line a sample."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from dtprobe.readers.artifact import Problems, as_float, as_int, as_text, json_lines, rank_of
from dtprobe.readers.schema import Schema

SCHEMA = Schema(
    "proc",
    {
        "threads": "Int64",
        "fds": "Int64",
        "sockets": "Int64",
        "pipes": "Int64",
        "files": "Int64",
        "maps": "Int64",
        "rss_bytes": "Int64",
        "state": "string",
        "wchan": "string",
        "cpu_user_s": "Float64",
        "cpu_system_s": "Float64",
        "voluntary": "Int64",
        "involuntary": "Int64",
        "thread_names": "string",
    },
)
"""`kind` is "sample". Counts are of the moment, `cpu_*_s` and the context switches since the process began. `thread_names` is a
JSON object of name to count. What a sample did not take is null: `maps` is dear and not in every one."""

_INTEGERS = ("t_ns", "pid", "tid", *(name for name, dtype in SCHEMA.own.items() if dtype == "Int64"))


def read_proc(path: Path, rank: int | None = None, problems: Problems | None = None) -> pd.DataFrame:
    """`proc.jsonl` as `proc`. `rank` defaults to each line's own, then to the folder's. Raises ReaderError."""
    lines = json_lines(path, problems)
    named = rank_of(path)
    ranks = [rank if rank is not None else as_int(line.get("rank")) for line in lines]
    return SCHEMA.frame(
        {
            **{name: [as_int(line.get(name)) for line in lines] for name in _INTEGERS},
            **{name: [as_float(line.get(name)) for line in lines] for name in ("cpu_user_s", "cpu_system_s")},
            **{name: [as_text(line.get(name)) or None for line in lines] for name in ("state", "wchan", "host")},
            "thread_names": [
                json.dumps(value) if isinstance(value := line.get("thread_names"), dict) else None for line in lines
            ],
            "rank": [named if one is None else one for one in ranks],
            "source": str(path),
            "kind": "sample",
        }
    )
