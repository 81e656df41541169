"""A partial result: what one task read of its share, as files that hold data only.

`lines.jsonl.zst`: a header, one JSON line a text artifact, an end. `dumps.arrow`: an Arrow stream with one batch a dump, whose rows are
the calls of all its lanes one after the other; its metadata is JSON: whose lanes, and what no dump of the share before it had of kinds of
calls, places in code and members of groups. So both are written and read one artifact at a time. Headers name schema, version and share.
"""

from __future__ import annotations

import base64
import io
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import zstandard

from dtprobe import __version__
from dtprobe.diagnose.analysts.collectives.recording import Dump
from dtprobe.diagnose.case import Artifact, Line
from dtprobe.diagnose.lines import Read, Reading, scan
from dtprobe.errors import DtprobeError
from dtprobe.readers.artifact import Problem
from dtprobe.readers.flight_columns import Column, Kind, Lane, RankCalls, Status, Tables

SCHEMA = "dtprobe.part/1"
LINES, DUMPS = "lines.jsonl.zst", "dumps.arrow"
_END = b"end"
_META = b"dump"
_INT64 = 2**63
_FIELDS: tuple[tuple[str, pa.DataType, str], ...] = (
    ("seq", pa.uint32(), "I"),
    ("kind", pa.uint32(), "I"),
    ("site", pa.uint32(), "I"),
    ("state", pa.uint8(), ""),
    ("created", pa.int64(), "q"),
    ("took", pa.float32(), "f"),
    ("order", pa.uint32(), "I"),
)


class BrokenPart(DtprobeError):
    """A partial result that cannot be read: cut, of another share or version, or no such thing."""


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Whatever damage does to a reader is a BrokenPart."""
    try:
        yield
    except BrokenPart:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        TypeError,
        ValueError,
        pa.ArrowException,
        zstandard.ZstdError,
    ) as error:
        raise BrokenPart(f"{path.name} is damaged ({type(error).__name__}: {error})") from error


def _header(mark: str) -> bytes:
    return json.dumps({"schema": SCHEMA, "dtprobe": __version__, "share": mark}).encode()


def _check(path: Path, said: bytes | None, mark: str) -> None:
    if said != _header(mark):
        raise BrokenPart(f"{path.name} is of another version or share: {(said or b'')[:200]!r}")


def _json(value: Any) -> bytes:
    """Exact also for text that is no UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _value(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogatepass"))


def write_lines(found: Iterable[Read], folder: Path, mark: str) -> None:
    """Write what was read of each text artifact, in their order."""
    with zstandard.open(folder / LINES, "wb") as file:
        file.write(_header(mark) + b"\n")
        for one in found:
            extent = {**asdict(one.extent), "dense": sorted(one.extent.dense)}
            problems = [[each.kind, each.text] for each in one.problems]
            file.write(_json([problems, extent, [_line(line) for line in one.lines]]) + b"\n")
        file.write(_END)


def _line(line: Line) -> list[Any]:
    text = None if line.text == line.raw else line.text
    return [line.number, line.raw, text, line.t_ns, line.rank, line.local_rank, line.host, line.pid, line.zoned]


def read_lines(texts: Sequence[Reading], folder: Path, mark: str) -> Iterator[Read]:
    """The same again. Raises BrokenPart."""
    path = folder / LINES
    with _readable(path), zstandard.open(path, "rb") as packed, io.BufferedReader(packed) as file:
        _check(path, file.readline().rstrip(b"\n"), mark)
        hosts: dict[str | None, str | None] = {}
        for reading in texts:
            problems, extent, lines = _value(file.readline())
            yield Read(
                lines=[_line_again(reading.artifact, line, hosts) for line in lines],
                problems=[Problem(reading.artifact.name, kind, text) for kind, text in problems],
                extent=scan.Extent(**{**extent, "dense": set(extent["dense"])}),
            )
        if file.readline() != _END:
            raise BrokenPart(f"{path.name} has no end")


def _line_again(artifact: Artifact, told: Sequence[Any], hosts: dict[str | None, str | None]) -> Line:
    number, raw, text, t_ns, rank, local_rank, host, pid, zoned = told
    return Line(
        artifact=artifact,
        number=number,
        text=raw if text is None else text,
        raw=raw,
        t_ns=t_ns,
        rank=rank,
        local_rank=local_rank,
        host=hosts.setdefault(host, host),
        pid=pid,
        zoned=zoned,
    )


class _Told:
    """How far tables were told already."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._kinds, self._sites = len(tables.kinds), len(tables.sites)
        self._members: dict[tuple[int, ...], int] = {}

    def members(self, ranks: tuple[int, ...] | None, fresh: list[tuple[int, ...]]) -> int | None:
        if ranks is None:
            return None
        number = self._members.get(ranks)
        if number is None:
            number = self._members[ranks] = len(self._members)
            fresh.append(ranks)
        return number

    def fresh(self) -> dict[str, Any]:
        """Kinds and places since the last time."""
        kinds, sites = self._tables.kinds_from(self._kinds), self._tables.sites[self._sites :]
        self._kinds += len(kinds)
        self._sites += len(sites)
        return {"kinds": [_kind(key, kind) for key, kind in kinds], "sites": sites}


def _kind(key: bytes, kind: Kind) -> list[Any]:
    sizes = [None if some is None else [_bounded(one) for one in some] for some in (kind.ins, kind.outs)]
    return [base64.b64encode(key).decode(), kind.op, *sizes, kind.dtypes, kind.shapes, kind.backend]


def _bounded(number: int) -> int | str:
    """JSON's numbers are decimal, and Python refuses thousands of decimal digits."""
    return number if -_INT64 <= number < _INT64 else hex(number)


def _number(told: int | str) -> int:
    return int(told, 16) if isinstance(told, str) else told


def write_dumps(found: Iterable[Dump], tables: Tables, folder: Path, mark: str) -> None:
    """Write what was read of each dump, in their order, as it is read into `tables`."""
    schema = pa.schema([(name, kind) for name, kind, _ in _FIELDS], metadata={_META: _header(mark)})
    told = _Told(tables)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(folder / DUMPS), "wb") as file, pa.ipc.new_stream(file, schema, options=options) as stream:
        for one in found:
            meta: dict[str, Any] = {"why": one.why, "problems": [[each.kind, each.text] for each in one.problems]}
            columns: Sequence[Column] = ()
            if one.calls is not None:
                columns = list(one.calls.columns.values())
                meta |= {"calls": _calls(one.calls, told)}
            stream.write_batch(_batch(columns, schema), custom_metadata={_META: _json(meta)})


def _batch(columns: Sequence[Column], schema: pa.Schema) -> pa.RecordBatch:
    count = sum(map(len, columns))
    arrays = [
        pa.Array.from_buffers(kind, count, [None, pa.py_buffer(b"".join(bytes(getattr(one, name)) for one in columns))])
        for name, kind, _ in _FIELDS
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _calls(calls: RankCalls, told: _Told) -> dict[str, Any]:
    members: list[tuple[int, ...]] = []
    groups = {name: told.members(ranks, members) for name, ranks in calls.groups.items()}
    return {
        **told.fresh(),
        "members": members,
        "groups": groups,
        "lanes": [[*lane, len(column)] for lane, column in calls.columns.items()],
        "size": calls.size,
        "version": calls.version,
        "described": calls.described,
        "status": calls.status,
        "cut": calls.cut,
        "wrapped": calls.wrapped,
        "timed": calls.timed,
        "dumped_ns": calls.dumped_ns,
        "last_ns": calls.last_ns,
        "backends": sorted(calls.backends),
        "limits": {group: _bounded(limit) for group, limit in calls.limits.items()},
    }


class Shared:
    """What the dumps of all shares have in common: one tuple of each group's members, for whoever compares them by identity."""

    def __init__(self) -> None:
        self._members: dict[tuple[int, ...], tuple[int, ...]] = {}

    def members(self, told: Sequence[int]) -> tuple[int, ...]:
        ranks = tuple(told)
        return self._members.setdefault(ranks, ranks)


def read_dumps(dumps: Sequence[Artifact], tables: Tables, shared: Shared, folder: Path, mark: str) -> Iterator[Dump]:
    """The same again, with the numbers that kinds and places have in `tables`. Raises BrokenPart.

    Kinds and places come into `tables` in the order in which reading the dumps themselves would bring them.
    """
    path = folder / DUMPS
    with _readable(path), pa.OSFile(str(path), "rb") as file, pa.ipc.open_stream(file) as stream:
        _check(path, (stream.schema.metadata or {}).get(_META), mark)
        if stream.schema.names != [name for name, _, _ in _FIELDS] or stream.schema.types != [kind for _, kind, _ in _FIELDS]:
            raise BrokenPart(f"{path.name} has other columns: {stream.schema.names}")
        batches = stream.iter_batches_with_custom_metadata()
        merging = _Merging(tables, shared)
        for artifact in dumps:
            found = next(batches, None)
            if found is None:
                raise BrokenPart(f"{path.name} ends before its last dump")
            batch, meta = found.batch, _value(found.custom_metadata[_META])
            problems = [Problem(artifact.name, kind, text) for kind, text in meta["problems"]]
            calls = merging.calls(artifact.name, meta["calls"], batch) if "calls" in meta else None
            yield Dump(artifact, calls, meta["why"], problems)
        if next(batches, None) is not None:
            raise BrokenPart(f"{path.name} goes on behind its last dump")


class _Merging:
    """From the numbers of one share's tables to those of all."""

    def __init__(self, tables: Tables, shared: Shared) -> None:
        self._tables = tables
        self._shared = shared
        self._kinds: list[int] = []
        self._sites = [0]
        self._members: list[tuple[int, ...]] = []

    def calls(self, name: str, told: dict[str, Any], batch: pa.RecordBatch) -> RankCalls:
        for key, op, ins, outs, dtypes, shapes, backend in told["kinds"]:
            kind = Kind(op, _sizes(ins), _sizes(outs), None if dtypes is None else tuple(dtypes), shapes, backend)
            self._kinds.append(self._tables.put(base64.b64decode(key), kind, self._kinds))
        self._sites += map(self._tables.site, told["sites"])
        self._members += map(self._shared.members, told["members"])
        return RankCalls(
            name=name,
            size=told["size"],
            version=told["version"],
            groups={group: None if number is None else self._members[number] for group, number in told["groups"].items()},
            described=told["described"],
            columns=self._columns(told["lanes"], batch),
            status={group: Status(*numbers) for group, numbers in told["status"].items()},
            cut=told["cut"],
            wrapped=told["wrapped"],
            timed=told["timed"],
            dumped_ns=told["dumped_ns"],
            last_ns=told["last_ns"],
            backends=frozenset(told["backends"]),
            limits={group: _number(limit) for group, limit in told["limits"].items()},
        )

    def _columns(self, lanes: Sequence[Sequence[Any]], batch: pa.RecordBatch) -> dict[Lane, Column]:
        if sum(lane[3] for lane in lanes) != batch.num_rows:
            raise BrokenPart(f"{batch.num_rows} calls, and lanes of others")
        rows = {name: _bytes(batch.column(at)) for at, (name, _, _) in enumerate(_FIELDS)}
        rows["kind"] = _renumbered(rows["kind"], self._kinds)
        rows["site"] = _renumbered(rows["site"], self._sites)
        found, start = {}, 0
        for group, src, dst, count in lanes:
            column = found[Lane(group, src, dst)] = Column()
            for name, kind, code in _FIELDS:
                width = kind.bit_width // 8
                part = rows[name][start * width : (start + count) * width]
                setattr(column, name, array(code, part.tobytes()) if code else bytearray(part))
            start += count
        return found


def _bytes(values: pa.Array) -> memoryview:
    """What is in an array without nulls; `to_numpy` would import pandas."""
    found = values.buffers()[1]
    if values.null_count or values.offset or (found is None and len(values)):
        raise BrokenPart("values are missing in a batch")
    return memoryview(found or b"")


def _renumbered(numbers: memoryview, known: Sequence[int]) -> memoryview:
    return memoryview(np.asarray(known, dtype=np.uint32)[np.frombuffer(numbers, dtype=np.uint32)].tobytes())


def _sizes(told: Sequence[int | str] | None) -> tuple[int, ...] | None:
    return None if told is None else tuple(map(_number, told))
