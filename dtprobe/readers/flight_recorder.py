"""Flight Recorder dumps of torch.distributed, pickled or JSON, of every version and backend."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from dtprobe.readers.artifact import Problems, ReaderError, as_int, as_text, note, rank_of, read_bytes
from dtprobe.readers.flight_dump import IN_TORCH, RANK_NAMES, content, ranks_of, split_name
from dtprobe.readers.schema import Schema

SCHEMA = Schema(
    "collectives",
    {
        "group": "string",
        "group_desc": "string",
        "op": "string",
        "seq": "Int64",
        "p2p_seq": "Int64",
        "op_id": "Int64",
        "record_id": "Int64",
        "state": "string",
        "sizes": "string",
        "out_sizes": "string",
        "dtypes": "string",
        "retired": "boolean",
        "t_started_ns": "Int64",
        "t_completed_ns": "Int64",
        "duration_ms": "Float64",
        "timeout_ms": "Int64",
        "src": "Int64",
        "dst": "Int64",
        "call_site": "string",
        "frames": "string",
        "thread_name": "string",
        "version": "string",
        "backend": "string",
    },
)
"""`kind` is collective or p2p, `t_ns` the time the call was made. `sizes` and `out_sizes` are JSON lists of shapes, `dtypes` is
separated by commas. `src` and `dst` are ranks within the group, as the operation's name gives them. `call_site` is the
innermost frame outside torch as "file:line func", `frames` all of them, innermost first, as "func (file:line)" separated by
";". Gloo knows no start and completion times: null, also where torch's JSON writes 0."""

GROUPS = Schema(
    "groups",
    {
        "group": "string",
        "group_desc": "string",
        "ranks": "string",
        "listed": "boolean",
        "last_enqueued": "Int64",
        "last_started": "Int64",
        "last_completed": "Int64",
        "comm_version": "string",
    },
)
"""`kind` is "group": one row a process group that a dump lists or its entries name. `ranks` is a JSON list, null where the dump
does not say (gloo's `pg_config` is one nameless group without ranks; `members` rebuilds them from all ranks' entries);
`listed` says whether the dump's own configuration has the group."""

MAX_TEXT = 4096
"""Longest text made of one entry's shapes or frames: a few shared lists of a hostile dump would otherwise fill the memory."""
_ENTRY_BYTES = 20


@dataclass(frozen=True)
class Dump:
    """What one dump holds, as frames of SCHEMA and GROUPS."""

    collectives: pd.DataFrame
    groups: pd.DataFrame


def read_flight_recorder(path: Path, rank: int | None = None, problems: Problems | None = None) -> pd.DataFrame:
    """The entries of one dump as `collectives`; see `read_dump`."""
    return read_dump(path, rank, problems).collectives


def read_dump(path: Path, rank: int | None = None, problems: Problems | None = None) -> Dump:
    """One dump: a pickle (of `_dump_fr_trace`, on a timeout or through the pipe) or JSON (`_dump_fr_trace_json`, `fr_trace_json`).

    Pickles are loaded as plain data only: one that would run code is refused. Of a cut file the complete entries are read,
    and a problem says so. `rank` defaults to what the file's or folder's name says; the dump itself does not tell it.
    Raises ReaderError for files that hold no entries and for refused ones.
    """
    data = read_bytes(path)
    whole = content(path, data, problems)
    entries = whole.get("entries")
    if not isinstance(entries, list):
        raise ReaderError(f"{path} is not a Flight Recorder dump: it has no list of entries", "dump with torch 2.2 or later")
    most = len(data) // _ENTRY_BYTES + 1
    if len(entries) > most:
        note(problems, path, "refused", f"{len(entries)} entries in {len(data)} bytes: only {most} are read")
    rows = [entry for entry in entries[:most] if isinstance(entry, dict) and entry]
    if len(rows) < min(len(entries), most):
        note(problems, path, "noise", f"{len(entries) - len(rows)} of {len(entries)} entries are not records")
    common = {"rank": rank if rank is not None else rank_of(path, RANK_NAMES), "source": str(path)}
    named = _named(rows)
    made = SCHEMA.frame({**common, **named, **_columns(rows), "version": as_text(whole.get("version"))})
    groups = GROUPS.frame({**common, **_groups(whole, rows, named)})
    return Dump(made, groups)


def members(collectives: pd.DataFrame) -> dict[str, tuple[int, ...]]:
    """Group -> the ranks that have entries of it, from all ranks' rows: what gloo's empty `pg_config` does not say.

    A rank that never called a collective in a group is missed.
    """
    known = collectives[["group", "rank"]].dropna().drop_duplicates()
    return {str(group): tuple(sorted(map(int, rows["rank"]))) for group, rows in known.groupby("group")}


def _named(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """Group and its description. Newer dumps have a pair, older ones a name."""
    groups: list[str | None] = []
    described: list[str | None] = []
    for row in rows:
        pair = row.get("process_group", row.get("pg_name"))
        pair = pair if isinstance(pair, tuple | list) else (pair,)
        groups.append(as_text(pair[0]) if pair else None)
        described.append(as_text(pair[1]) if len(pair) > 1 else None)
    return {"group": groups, "group_desc": described}


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    given = [as_text(row.get("profiling_name")) for row in rows]
    split = {name: split_name(name) for name in set(given)}
    names = [split[name] for name in given]
    stacks = _Stacks()
    told = [stacks.told(row.get("frames")) for row in rows]
    shapes = _Shapes()
    return {
        "t_ns": _times(rows, "time_created_ns", "time_created_us"),
        "kind": ["p2p" if row.get("is_p2p") is True else "collective" for row in rows],
        "backend": [name[0] for name in names],
        "op": [name[1] for name in names],
        "src": [name[2] for name in names],
        "dst": [name[3] for name in names],
        "seq": _integers(row.get("collective_seq_id", row.get("seq_id")) for row in rows),
        **{column: _integers(row.get(key) for row in rows) for column, key in _INTEGERS.items()},
        "state": _texts(row.get("state") for row in rows),
        "sizes": [shapes.told(row.get("input_sizes")) for row in rows],
        "out_sizes": [shapes.told(row.get("output_sizes")) for row in rows],
        "dtypes": [_joined(row.get("input_dtypes")) for row in rows],
        "retired": [value if isinstance(value := row.get("retired"), bool) else None for row in rows],
        "t_started_ns": _times(rows, "time_discovered_started_ns"),
        "t_completed_ns": _times(rows, "time_discovered_completed_ns"),
        "duration_ms": [value if type(value := row.get("duration_ms")) is float else None for row in rows],
        "thread_name": _texts(row.get("thread_name") for row in rows),
        "frames": [one[0] for one in told],
        "call_site": [one[1] for one in told],
    }


_INTEGERS = {"p2p_seq": "p2p_seq_id", "op_id": "op_id", "record_id": "record_id", "timeout_ms": "timeout_ms"}


def _integers(values: Iterable[Any]) -> pa.Array | list[int | None]:
    found = list(values)
    if {type(value) for value in found} <= {int, type(None)}:
        try:
            return pa.array(found, type=pa.int64())
        except (OverflowError, pa.ArrowInvalid):
            pass  # one of them has more than 64 bits: it is left out below
    return [as_int(value) for value in found]


def _times(rows: Sequence[Mapping[str, Any]], key: str, in_us: str = "") -> pa.Array | list[int | None]:
    """Times in ns; torch's JSON writes 0 for those that are not known."""
    if in_us and rows and key not in rows[0] and in_us in rows[0]:
        return _integers(value * 1000 if type(value := row.get(in_us)) is int and value else None for row in rows)
    return _integers(row.get(key) or None for row in rows)


def _texts(values: Iterable[Any]) -> list[str | None]:
    return [value if type(value) is str else None for value in values]


class _Shapes:
    """Shapes as JSON text. The same lists come again and again: each is told once."""

    def __init__(self) -> None:
        self._told: dict[int, str | None] = {}

    def told(self, shapes: Any) -> str | None:
        if not isinstance(shapes, list | tuple):
            return None
        if len(shapes) == 1 and type(shapes[0]) is list and len(shapes[0]) == 1 and type(shapes[0][0]) is int:
            size = as_int(shapes[0][0])
            return None if size is None else f"[[{size}]]"  # by far the most: flat gradients and parameters
        key = id(shapes)
        if key not in self._told:
            self._told[key] = self._text(shapes)
        return self._told[key]

    @staticmethod
    def _text(shapes: Sequence[Any]) -> str | None:
        if not all(
            isinstance(shape, list | tuple) and all(as_int(size) is not None for size in shape[:16])
            for shape in shapes[:MAX_TEXT]
        ):
            return None
        text = "[" + ",".join("[" + ",".join(str(size) for size in shape[:16]) + "]" for shape in shapes[:MAX_TEXT]) + "]"
        return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def _joined(values: Any) -> str | None:
    if not isinstance(values, list | tuple):
        return None
    if len(values) == 1 and isinstance(values[0], str):
        return values[0][:MAX_TEXT]
    return ",".join(value for value in values[:512] if isinstance(value, str))[:MAX_TEXT]


class _Stacks:
    """Frames as text, each told once: a dump of 2,000 entries has a hundred different ones."""

    def __init__(self) -> None:
        self._frames: dict[int, tuple[str, str, bool]] = {}

    def told(self, frames: Any) -> tuple[str | None, str | None]:
        """All frames, and the innermost one outside torch."""
        if not isinstance(frames, list | tuple) or not frames:
            return None, None
        parts = [self._frames.get(id(frame)) or self._frame(frame) for frame in frames[:128]]
        site = next((part[1] for part in parts if part[2]), parts[0][1])
        return ";".join([part[0] for part in parts])[:MAX_TEXT], site

    def _frame(self, frame: Any) -> tuple[str, str, bool]:
        get = frame.get if isinstance(frame, dict) else {}.get
        name, file, line = str(as_text(get("name")) or "?"), str(as_text(get("filename")) or "?"), as_int(get("line"))
        where = f"{file}:{line}" if line is not None else file
        made = f"{name} ({where})"[:MAX_TEXT], f"{where} {name}"[:MAX_TEXT], not IN_TORCH.search(file)
        self._frames[id(frame)] = made
        return made


def _groups(
    whole: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], named: Mapping[str, Sequence[str | None]]
) -> dict[str, Any]:
    """The groups that the dump lists with their ranks, and those that only its entries name."""
    found: dict[str, dict[str, Any]] = {}
    config = whole.get("pg_config")
    for key, value in list(config.items())[:MAX_TEXT] if isinstance(config, dict) else []:
        described = value if isinstance(value, dict) else {}
        ranks = ranks_of(described.get("ranks"))
        if isinstance(key, str) and (key or ranks):  # gloo lists one group without name and ranks, whatever there is
            found[key] = {
                "group_desc": as_text(described.get("desc")),
                "ranks": json.dumps(ranks) if ranks else None,
                "listed": True,
            }
    numbers: dict[int, str] = {}
    for row, group, described_as in zip(rows, named["group"], named["group_desc"], strict=True):
        if group is None:
            continue
        known = found.setdefault(group, {"group_desc": described_as, "ranks": None, "listed": False})
        known["group_desc"] = known["group_desc"] or described_as
        number = row.get("pg_id")
        if type(number) is int:
            numbers.setdefault(number, group)
    status = whole.get("pg_status")
    for number, value in list(status.items())[:MAX_TEXT] if isinstance(status, dict) else []:
        group = numbers.get(int(number)) if isinstance(number, str) and re.fullmatch("[0-9]{1,9}", number) else None
        if group is not None and isinstance(value, dict):
            found[group] |= {short: _known(value.get(f"{short}_collective")) for short in _STATUS}
    return {
        "kind": "group",
        "group": list(found),
        **{key: [one.get(key) for one in found.values()] for key in ("group_desc", "ranks", "listed", *_STATUS)},
        "comm_version": as_text(whole.get("comm_lib_version", whole.get("nccl_version"))) or None,
    }


_STATUS = ("last_enqueued", "last_started", "last_completed")


def _known(value: Any) -> int | None:
    """A count; torch writes -1 for what it does not know."""
    number = as_int(value)
    return number if number is not None and number >= 0 else None
