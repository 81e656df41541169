"""Events and exact counts that the `bpf` recorder's bpftrace wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from dtprobe.readers import perf
from dtprobe.readers.artifact import INT64, Problems, ReaderError, note, rank_of, read_text

LIMIT = 1 << 30
_EVENT = re.compile(r"^([0-9]{1,10})\.([0-9]{1,9}) ([0-9]{1,9}) ([0-9]{1,9}) (\S+)(?: (.*))?$")
_COUNT = re.compile(r"^@calls\[(.+)\]: ([0-9]{1,18})$")


@dataclass(frozen=True)
class Traced:
    """What one file holds, as frames of `perf.SAMPLES` and `perf.COUNTS`: the same things, seen by another recorder."""

    samples: pd.DataFrame
    counts: pd.DataFrame


def read_bpf(path: Path, rank: int | None = None, problems: Problems | None = None) -> Traced:
    """`bpf.txt`: lines `<seconds since the epoch> <pid> <tid> <probe> <thread name>` and `@calls[<probe>]: <count>`.

    bpftrace may drop lines, not counts. An empty file holds nothing. Raises ReaderError for other text.
    """
    lines = [line for line in read_text(path, LIMIT, problems).splitlines() if line.strip()]
    events = [found.groups() for line in lines if (found := _EVENT.match(line))]
    counts = [(found[1], int(found[2])) for line in lines if (found := _COUNT.match(line))]
    others = len(lines) - len(events) - len(counts)
    if others and not events and not counts:
        raise ReaderError(f"{path} is not the bpf recorder's output: none of its {len(lines)} lines is", "give a bpf.txt")
    if others:
        note(problems, path, "noise", f"{others} of {len(lines)} lines are neither events nor counts")
    common = {"rank": rank if rank is not None else rank_of(path), "source": str(path)}
    times = [int(seconds) * 10**9 + int(part.ljust(9, "0")) for seconds, part, *_ in events]
    samples = perf.SAMPLES.frame(
        {
            **common,
            "kind": "sample",
            "t_ns": [at if at < INT64 else None for at in times],
            "pid": [int(one[2]) for one in events],
            "tid": [int(one[3]) for one in events],
            "event": [one[4] for one in events],
            "comm": [one[5] or None for one in events],
        }
    )
    totals = {"event": [name for name, _ in counts], "count": [count for _, count in counts]}
    values = [float(count) for _, count in counts]
    return Traced(samples, perf.COUNTS.frame({**common, **totals, "kind": "count", "value": values}))
