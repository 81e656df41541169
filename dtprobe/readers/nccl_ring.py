"""The ring file of the NCCL shim (`injectors/nccl`): each call into libnccl that it still holds, also those under way.

The file may be read at any time, also while its process runs, hangs or is stopped. Layout: `struct ring_header` and `struct
ring_entry` in `injectors/nccl/shim.h`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dtprobe.readers.artifact import Problems, ReaderError, note, opened, rank_of
from dtprobe.readers.schema import Schema

SCHEMA = Schema(
    "nccl_calls",
    {
        "call": "string",
        "comm": "string",
        "comm_index": "Int64",
        "seq": "Int64",
        "nranks": "Int64",
        "comm_rank": "Int64",
        "count": "Int64",
        "dtype": "string",
        "root": "Int64",
        "peer": "Int64",
        "redop": "string",
        "stream": "string",
        "result": "string",
        "in_group": "boolean",
        "duration_s": "Float64",
        "in_flight": "boolean",
        "fired": "string",
        "asked": "Int64",
    },
)
"""`kind` is collective, p2p, init, group, life (finalize, destroy, abort) or query. `comm` is 16 hexadecimal digits, the same on
every rank of a communicator made from one ncclUniqueId or split from such; `comm_index` its order of creation in the process;
`seq` numbers the process's collective and point-to-point calls on it from 1. count, dtype, root, peer, redop are what was handed
to NCCL; where a fault replaced one of them, `asked` is the program's own value. `result` is null while the call has not
returned (`in_flight`); for ncclCommGetAsyncError it is the call's own result, and polls that report nothing new are not recorded.
`duration_s` is the time on the host: a collective that returned has been launched, not completed. `fired` is the fault."""

MAGIC = b"DTPNCCL1"
VERSION = 1
RESULTS = (
    "ncclSuccess",
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
    "ncclInvalidArgument",
    "ncclInvalidUsage",
    "ncclRemoteError",
    "ncclInProgress",
    "ncclTimeout",
)
"""ncclResult_t; the last one is known to newer libraries only (2.32 has it, 2.28 does not)."""
DTYPES = (
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float8e4m3",
    "float8e5m2",
)
REDOPS = ("sum", "prod", "max", "min", "avg")
KINDS = {"c": "collective", "p": "p2p", "i": "init", "g": "group", "l": "life", "q": "query"}

_NONE = -(2**31)
_WRITING, _ENTERED, _RETURNED = 1, 2, 3
_MOST_ENTRIES = 2**20
_LOOKS = 5
_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("entry_bytes", "<u4"),
        ("entries", "<u4"),
        ("pid", "<i4"),
        ("rank", "<i4"),
        ("created", "<u8"),
        ("realtime_minus", "<i8"),
        ("next", "<u8"),
        ("lost", "<u8"),
        ("nccl_version", "<i4"),
        ("faults", "<u4"),
        ("calls", "<u4"),
        ("flags", "<u4"),
        ("pad", "V48"),
        ("host", "S64"),
        ("library", "S832"),
        ("called", "<u8", 64),
        ("fired", "<u8", 64),
        ("matched", "<u8", 64),
        ("names", "V32", 64),
        ("labels", "S128", 64),
    ]
)
_ENTRY = np.dtype(
    [
        ("stamp", "<u8"),
        ("t_enter", "<u8"),
        ("t_return", "<u8"),
        ("count", "<u8"),
        ("stream", "<u8"),
        ("comm", "<u8"),
        ("seq", "<u8"),
        ("asked", "<i8"),
        ("call", "<u4"),
        ("result", "<i4"),
        ("nranks", "<i4"),
        ("comm_rank", "<i4"),
        ("comm_index", "<i4"),
        ("dtype", "<i4"),
        ("root", "<i4"),
        ("redop", "<i4"),
        ("tid", "<i4"),
        ("fault", "<i4"),
        ("in_group", "<u4"),
        ("pad", "V20"),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Ring:
    """What a ring says about its process, beside the calls.

    `called` counts every call by name since the process began, also those that the ring no longer holds or never held (polls).
    `matched` and `fired` count, per fault of the plan, the calls it aimed at and those at which it fired.
    """

    pid: int
    rank: int | None
    host: str
    library: str
    nccl_version: int
    called: Mapping[str, int]
    matched: Mapping[str, int]
    fired: Mapping[str, int]
    lost: int
    plan_refused: bool
    exited: bool
    forked: bool


def read_nccl_ring(path: Path, rank: int | None = None, *, problems: Problems | None = None) -> pd.DataFrame:
    """The calls of one ring file as `nccl_calls`, in order of their beginning.

    Entries that are being written at this moment are looked at again, then left out and counted in `problems`. `rank` defaults
    to the ring's own, then to what the name says. Raises ReaderError for a file that is no such ring.
    """
    header, entries = _snapshot(path, problems)
    names, kinds = _names(header)
    known = entries["call"] < len(names)
    if not known.all():
        note(problems, path, "noise", f"{int((~known).sum())} entries name no known call")
    entries = entries[known]
    entries = entries[np.lexsort((entries["stamp"], entries["t_enter"]))]
    labels = [_text(label) for label in header["labels"]][: int(header["faults"])]
    kind = [kinds[call] for call in entries["call"]]
    p2p = np.array([one == "p2p" for one in kind], dtype=bool)
    in_flight = entries["stamp"] & 3 == _ENTERED
    root = _optional(entries["root"])
    own = _rank(header)
    return SCHEMA.frame(
        {
            "t_ns": _wrapped(entries["t_enter"]) + int(header["realtime_minus"]),
            "host": _text(header["host"]) or None,
            "rank": rank if rank is not None else own if own is not None else rank_of(path),
            "pid": int(header["pid"]),
            "tid": _wrapped(entries["tid"]),
            "source": str(path),
            "kind": kind,
            "call": [names[call] for call in entries["call"]],
            "comm": [f"{comm:016x}" if comm else None for comm in entries["comm"].tolist()],
            "comm_index": _optional(entries["comm_index"]),
            "seq": _wrapped(entries["seq"]).mask(entries["seq"] == 0),
            "nranks": _optional(entries["nranks"]),
            "comm_rank": _optional(entries["comm_rank"]),
            "count": _wrapped(entries["count"]).mask(np.array([one not in ("collective", "p2p") for one in kind], dtype=bool)),
            "dtype": _worded(entries["dtype"], DTYPES),
            "root": root.mask(p2p),
            "peer": root.mask(~p2p),
            "redop": _worded(entries["redop"], REDOPS),
            "stream": [f"0x{stream:x}" for stream in entries["stream"].tolist()],
            "result": _worded(np.where(in_flight, _NONE, entries["result"]), RESULTS),
            "in_group": entries["in_group"] != 0,
            "duration_s": pd.Series(
                (_wrapped(entries["t_return"]) - _wrapped(entries["t_enter"])).astype("Float64") / 1e9
            ).mask(in_flight),
            "in_flight": in_flight,
            "fired": [labels[fault] if 0 <= fault < len(labels) else None for fault in entries["fault"].tolist()],
            "asked": pd.Series(entries["asked"].astype("int64"), dtype="Int64").mask(entries["fault"] < 0),
        }
    )


def read_nccl_header(path: Path) -> Ring:
    """What the ring says about its process. Raises ReaderError for a file that is no such ring."""
    header = _header(path)
    names, _ = _names(header)
    labels = [_text(label) for label in header["labels"]][: int(header["faults"])]
    flags = int(header["flags"])
    return Ring(
        pid=int(header["pid"]),
        rank=_rank(header),
        host=_text(header["host"]),
        library=_text(header["library"]),
        nccl_version=int(header["nccl_version"]),
        called={name: int(count) for name, count in zip(names, header["called"], strict=False) if count},
        matched=_summed(labels, header["matched"]),
        fired=_summed(labels, header["fired"]),
        lost=int(header["lost"]),
        plan_refused=bool(flags & 1),
        exited=bool(flags & 2),
        forked=bool(flags & 4),
    )


def read_nccl_under_way(path: Path) -> list[int]:
    """When each call that has not returned began, in nanoseconds UTC; much cheaper than reading all. Raises ReaderError."""
    header = _header(path)
    entries = _entries(path, header)
    begun = entries["t_enter"][(entries["stamp"] != 0) & (entries["stamp"] & 3 == _ENTERED)]
    return [int(one) + int(header["realtime_minus"]) for one in begun.tolist()]


def _summed(labels: list[str], counts: np.ndarray) -> dict[str, int]:
    found: dict[str, int] = {}
    for label, count in zip(labels, counts, strict=False):
        found[label] = found.get(label, 0) + int(count)
    return found


def _header(path: Path) -> Any:
    with opened(path) as file:
        raw = file.read(_HEADER.itemsize)
    if raw[: len(MAGIC)] != MAGIC:
        raise ReaderError(f"{path} is not a ring of NCCL calls", "give an nccl-<pid>.ring file")
    if len(raw) < _HEADER.itemsize:
        raise ReaderError(f"{path} is cut: {len(raw)} bytes of a header of {_HEADER.itemsize}", "give the whole file")
    header = np.frombuffer(raw, _HEADER)[0]
    shape = (int(header["version"]), int(header["header_bytes"]), int(header["entry_bytes"]))
    if shape != (VERSION, _HEADER.itemsize, _ENTRY.itemsize) or not 0 < header["entries"] <= _MOST_ENTRIES:
        raise ReaderError(
            f"{path} is a ring of version {shape[0]} with {int(header['entries'])} entries of {shape[2]} bytes,"
            f" this reader knows version {VERSION} with entries of {_ENTRY.itemsize} bytes",
            "read it with the dtprobe that wrote it",
        )
    if header["faults"] > len(header["labels"]) or header["calls"] > len(header["names"]):
        raise ReaderError(f"{path} is damaged: {int(header['calls'])} calls, {int(header['faults'])} faults in its header")
    return header


def _snapshot(path: Path, problems: Problems | None) -> tuple[Any, np.ndarray]:
    """Header and consistent entries. An entry counts if its stamp is the same before and after it was copied."""
    header = _header(path)
    entries = _entries(path, header)
    if len(entries) < header["entries"]:
        note(problems, path, "cut", f"{len(entries)} of {int(header['entries'])} entries are there")
    good = np.zeros(len(entries), dtype=bool)
    for _ in range(_LOOKS):
        again = _entries(path, header)[: len(entries)]
        entries, good = entries[: len(again)], good[: len(again)]
        good |= (again["stamp"] == entries["stamp"]) & (entries["stamp"] & 3 != _WRITING)
        if good.all():
            break
        entries = np.where(good, entries, again)
    torn = int((~good).sum())
    if torn:
        note(problems, path, "incomplete", f"{torn} entries were being written in each of {_LOOKS} looks")
    if header["lost"]:
        note(problems, path, "incomplete", f"{int(header['lost'])} calls found no room in the ring")
    return header, entries[good & (entries["stamp"] != 0) & (entries["stamp"] & 3 >= _ENTERED)]


def _entries(path: Path, header: Any) -> np.ndarray:
    with opened(path) as file:
        file.seek(_HEADER.itemsize)
        raw = file.read(int(header["entries"]) * _ENTRY.itemsize)
    return np.frombuffer(raw[: len(raw) // _ENTRY.itemsize * _ENTRY.itemsize], _ENTRY)


def _rank(header: Any) -> int | None:
    return int(header["rank"]) if header["rank"] >= 0 else None


def _names(header: Any) -> tuple[list[str], list[str]]:
    """Call names and kinds by number; the last byte of a name is its kind's letter."""
    raw = [bytes(name) for name in header["names"]][: int(header["calls"])]
    return [_text(name[:31].split(b"\0")[0]) for name in raw], [KINDS.get(chr(name[31]), "query") for name in raw]


def _text(raw: bytes) -> str:
    text = bytes(raw).split(b"\0")[0].decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _wrapped(values: np.ndarray) -> pd.Series:
    """Unsigned values as Int64; what a damaged file makes larger than that wraps, and does not raise."""
    return pd.Series(values.astype("int64"), dtype="Int64")


def _optional(values: np.ndarray) -> pd.Series:
    return _wrapped(values).mask(values == _NONE)


def _worded(values: np.ndarray, words: tuple[str, ...]) -> list[str | None]:
    return [None if one == _NONE else words[one] if 0 <= one < len(words) else str(one) for one in values.tolist()]
