"""What an arm left beside values: two arms that left the same differ in nothing that a diagnosis could take for a sign.

Compared are the kinds of the ranks' records and the errors in them (what a program calls its steps is a name of its own), the shapes of what they printed, their recorded collectives with
groups, sizes and ends, and how the processes ended. Numbers, times and counts are values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtprobe.diagnose.analysts.collectives.recording import gather
from dtprobe.diagnose.intake import taken
from dtprobe.readers.flight_columns import DONE

_VALUE = re.compile(r"0x[0-9a-fA-F]+|\d[\d.:+e-]*")
_LOG = re.compile(r"stdout\.log|stderr\.log")
Trace = frozenset[tuple[str, ...]]


def traces(folder: Path, ranks: Sequence[Mapping[str, Any]]) -> Trace:
    """Of one repeat's folder; `ranks` are its ranks as the run's record has them, with exit codes and signals."""
    found: set[tuple[str, ...]] = {
        ("end", str(one["rank"]), str(one.get("exit_code")), str(one.get("signal"))) for one in ranks
    }
    for file in sorted(folder.rglob("*")):
        if file.name == "events.jsonl":
            found |= set(_records(file))
        elif _LOG.fullmatch(file.name):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            found |= {("line", file.parent.name, _VALUE.sub("#", line)) for line in lines}
    with taken([folder]) as artifacts:
        recording = gather(artifacts.artifacts, [])
    if recording is not None:
        for rank, calls in recording.ranks.items():
            for lane, column in calls.columns.items():
                for number, state in zip(column.kind, column.state, strict=True):
                    kind = recording.tables.kinds[number]
                    told = (calls.described.get(lane.group, ""), kind.op, str(kind.ins), str(kind.dtypes), str(state == DONE))
                    found.add(("call", str(rank), _VALUE.sub("#", lane.group), *told))
    return frozenset(found)


def _records(file: Path) -> Iterator[tuple[str, ...]]:
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict):
            told = ("rank", "kind", "what", "error") if one.get("error") else ("rank", "kind")
            yield ("record", *(str(one.get(name, "")) for name in told))
