"""What the workers said of themselves (`dtprobe.worker.record`): one JSON line an observation."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from dtprobe.readers.artifact import Problems, as_float, as_int, as_text, json_lines, rank_of
from dtprobe.readers.schema import COMMON, Schema

SCHEMA = Schema("events", {"name": "string", "value": "Float64", "fields": "string"})
"""`kind` is the worker's own word. `name` and `value` are the fields of those names, where given; `fields` is a JSON object of
all that are not common columns."""


def read_events(path: Path, rank: int | None = None, problems: Problems | None = None) -> pd.DataFrame:
    """`events.jsonl` as `events`. `rank` defaults to each line's own, then to the folder's. Raises ReaderError.

    A line cut by the end of the worker, or broken into by another writer, goes to `problems`.
    """
    lines = json_lines(path, problems)
    named = rank_of(path)
    ranks = [rank if rank is not None else as_int(line.get("rank")) for line in lines]
    return SCHEMA.frame(
        {
            **{name: [as_int(line.get(name)) for line in lines] for name in ("t_ns", "pid", "tid")},
            **{name: [as_text(line.get(name)) for line in lines] for name in ("host", "kind", "name")},
            "value": [as_float(line.get("value")) for line in lines],
            "fields": [json.dumps({name: line[name] for name in line if name not in COMMON}) for line in lines],
            "rank": [named if one is None else one for one in ranks],
            "source": str(path),
        }
    )
