"""iperf3's JSON: what TCP and UDP flows achieved, interval by interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from dtprobe.readers.artifact import (
    INT64,
    Problems,
    ReaderError,
    as_float,
    as_int,
    as_text,
    load_json,
    note,
    rank_of,
    read_bytes,
)
from dtprobe.readers.schema import Schema

SCHEMA = Schema(
    "iperf",
    {
        "protocol": "string",
        "flows": "Int64",
        "start_s": "Float64",
        "end_s": "Float64",
        "bytes": "Int64",
        "bits_per_s": "Float64",
        "retransmits": "Int64",
        "lost": "Int64",
        "packets": "Int64",
        "sender": "boolean",
    },
)
"""`kind` is "interval", the sum over all flows of one, in order; `start_s` and `end_s` count from the test's start. `t_ns` is the
test's start plus `start_s`, to the second: iperf3 says no more. `lost` and `packets` are UDP's, as the receiver counts them;
`sender` says whose figures the row holds."""

LIMIT = 256 << 20


def read_iperf(path: Path, rank: int | None = None, problems: Problems | None = None) -> pd.DataFrame:
    """The output of `iperf3 -J`, of a client or a server, as `iperf`. Raises ReaderError.

    A test that was interrupted has its intervals; the complaint goes to `problems`. iperf3 3.12 then prints the last one twice, which
    counts once.
    """
    try:
        value = load_json(read_bytes(path, LIMIT, problems).strip())
    except ValueError as error:
        raise ReaderError(f"{path} is not iperf3's JSON: {str(error)[:120]}", "run it with -J") from error
    if not isinstance(value, dict) or not isinstance(value.get("intervals"), list):
        raise ReaderError(f"{path} is not iperf3's JSON: no intervals", "run it with -J")
    if isinstance(complaint := value.get("error"), str):
        note(problems, path, "incomplete", complaint)
    start = _mapping(value.get("start"))
    test = _mapping(start.get("test_start"))
    began = as_int(_mapping(start.get("timestamp")).get("timesecs"))
    sums = [_mapping(_mapping(one).get("sum")) for one in value["intervals"]]
    sums = [one for one in sums if as_float(one.get("start")) is not None]
    sums = [one for number, one in enumerate(sums) if number == 0 or one != sums[number - 1]]
    starts = [as_float(one["start"]) for one in sums]
    return SCHEMA.frame(
        {
            "t_ns": [_at(began, at) for at in starts],
            "kind": ["interval"] * len(sums),
            "protocol": (as_text(test.get("protocol")) or "").lower() or None,
            "flows": as_int(test.get("num_streams")),
            "start_s": starts,
            "end_s": [as_float(one.get("end")) for one in sums],
            "bytes": [as_int(one.get("bytes")) for one in sums],
            "bits_per_s": [as_float(one.get("bits_per_second")) for one in sums],
            "retransmits": [as_int(one.get("retransmits")) for one in sums],
            "lost": [as_int(one.get("lost_packets")) for one in sums],
            "packets": [as_int(one.get("packets")) for one in sums],
            "sender": [one["sender"] if isinstance(one.get("sender"), bool) else None for one in sums],
            "rank": rank if rank is not None else rank_of(path),
            "source": str(path),
        }
    )


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _at(began_s: int | None, after_s: float | None) -> int | None:
    if began_s is None or after_s is None or not abs(after_s) < 1e9 or abs(began_s) > INT64 // 10**9 - 10**9:
        return None
    return began_s * 10**9 + int(after_s * 1e9)
