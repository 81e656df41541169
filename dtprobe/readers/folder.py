"""All artifacts of one arm run, or of any folder with files of the same names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pandas as pd

from dtprobe.readers import bpf, events, flight_recorder, inotify, iperf, logs, nccl_ring, nsys, perf, proc, pyspy, rdma, strace
from dtprobe.readers.artifact import Problem, Problems, ReaderError, one_line, rank_of
from dtprobe.readers.schema import Schema

PROBLEMS = Schema("problems", {"text": "string"})
"""What could not be read: `source` is the file, `kind` one word (cut, noise, refused, unreadable, incomplete, clock)."""

SCHEMAS: Mapping[str, Schema] = {
    schema.name: schema
    for schema in (
        strace.SCHEMA,
        flight_recorder.SCHEMA,
        flight_recorder.GROUPS,
        proc.SCHEMA,
        events.SCHEMA,
        logs.SCHEMA,
        pyspy.SCHEMA,
        inotify.SCHEMA,
        perf.SAMPLES,
        perf.COUNTS,
        nsys.SCHEMA,
        nccl_ring.SCHEMA,
        rdma.BANDWIDTH,
        rdma.COUNTERS,
        rdma.PORTS,
        iperf.SCHEMA,
        PROBLEMS,
    )
}
"""Every kind of frame, by name."""

_DEPTH = 3


class Reader(Protocol):
    """Reads one artifact into frames by name."""

    def __call__(self, path: Path, rank: int | None, problems: Problems) -> dict[str, pd.DataFrame]: ...


@dataclass(frozen=True)
class Artifact:
    """A file that some reader reads. `kind` names the artifact's form: strace, proc, ..."""

    path: Path
    kind: str
    rank: int | None


def _one(name: str, read: Callable[..., pd.DataFrame]) -> Reader:
    return lambda path, rank, problems: {name: read(path, rank, problems=problems)}


def _dump(path: Path, rank: int | None, problems: Problems) -> dict[str, pd.DataFrame]:
    dump = flight_recorder.read_dump(path, rank, problems)
    return {"collectives": dump.collectives, "groups": dump.groups}


def _traced(path: Path, rank: int | None, problems: Problems) -> dict[str, pd.DataFrame]:
    traced = bpf.read_bpf(path, rank, problems)
    return {"perf_samples": traced.samples, "perf_counts": traced.counts}


_READERS: Mapping[str, tuple[str, Reader]] = {
    "strace": (r"strace[\w.-]*", _one("syscalls", strace.read_strace)),
    "flight_recorder": (r"fr-\d+\.json|(?:\w+_trace_rank_|_dump_)\d+(?:\.json)?", _dump),
    "proc": (r"proc\.jsonl", _one("proc", proc.read_proc)),
    "events": (r"events\.jsonl", _one("events", events.read_events)),
    "pyspy": (r"pyspy[\w.-]*\.(?:json|txt)", _one("stacks", pyspy.read_pyspy)),
    "inotify": (r"inotify[\w.-]*\.(?:txt|csv|log)", _one("file_events", inotify.read_inotify)),
    "perf_script": (r"perf[\w.-]*\.script\.txt", _one("perf_samples", perf.read_perf_script)),
    "perf_stat": (r"perf[\w.-]*\.stat\.(?:txt|csv|json)", _one("perf_counts", perf.read_perf_stat)),
    "bpf": (r"bpf\.txt", _traced),
    "nsys": (r"[\w.-]*\.sqlite", _one("gpu_ops", nsys.read_nsys)),
    "nccl_ring": (r"nccl-\d+(?:-\d+)?\.ring", _one("nccl_calls", nccl_ring.read_nccl_ring)),
    "perftest": (r"ib_(?:write|read|send)_bw[\w.-]*\.(?:txt|log)", _one("rdma_bandwidth", rdma.read_perftest)),
    "rdma_counters": (r"(?:hw_)?counters[\w.-]*\.txt", _one("rdma_counters", rdma.read_counters)),
    "ibstat": (r"ibstat[\w.-]*\.txt", _one("rdma_ports", rdma.read_ibstat)),
    "iperf": (r"iperf3?[\w.-]*\.json", _one("iperf", iperf.read_iperf)),
    "logs": (r"(?:stdout|stderr)\.log", _one("log_lines", logs.read_logs)),
}
_KINDS = {kind: re.compile(pattern) for kind, (pattern, _) in _READERS.items()}


def artifacts(path: Path) -> list[Artifact]:
    """The files below a folder, at most three folders deep, that a reader reads, in the order of their names.

    Links are not followed. Raises ReaderError where the folder cannot be listed.
    """
    found = []
    try:
        for folder, below, names in os.walk(path, onerror=_raise):
            below.sort()
            if len(Path(folder).relative_to(path).parts) >= _DEPTH:
                below.clear()
            for name in sorted(names):
                file = Path(folder, name)
                kind = next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(name)), None)
                if kind and not file.is_symlink():
                    found.append(Artifact(file, kind, rank_of(file.relative_to(path))))
    except OSError as error:
        raise ReaderError(f"cannot list {error.filename}: {error.strerror}", "check the path and its permissions") from error
    return found


def _raise(error: OSError) -> None:
    raise error


def read_folder(path: Path) -> dict[str, pd.DataFrame]:
    """One arm-run folder as frames by name; every name of SCHEMAS is there, empty where nothing was recorded.

    The rank is taken from the folders' names. Never raises for what it finds: a file that cannot be read, or not wholly, is
    a row of `problems`.
    """
    problems: Problems = []
    parts: dict[str, list[pd.DataFrame]] = {}
    try:
        files = artifacts(path)
    except ReaderError as error:
        files = []
        problems.append(Problem(str(path), "unreadable", str(error)))
    for file in files:
        try:
            frames = _READERS[file.kind][1](file.path, file.rank, problems)
        except ReaderError as error:
            kind = "refused" if "refused" in error.message else "unreadable"
            problems.append(Problem(str(file.path), kind, one_line(str(error), 300)))
            continue
        for name, frame in frames.items():
            if len(frame):
                parts.setdefault(name, []).append(frame)
    parts["problems"] = [_problems(problems, path)] if problems else []
    return {name: _together(schema, parts.get(name, [])) for name, schema in SCHEMAS.items()}


def _together(schema: Schema, parts: list[pd.DataFrame]) -> pd.DataFrame:
    if not parts:
        return schema.empty()
    return schema.check(pd.concat(parts, ignore_index=True) if len(parts) > 1 else parts[0])


def _problems(problems: Problems, path: Path) -> pd.DataFrame:
    return PROBLEMS.frame(
        {
            "rank": [rank_of(Path(one.source).relative_to(path)) for one in problems],
            "source": [one.source for one in problems],
            "kind": [one.kind for one in problems],
            "text": [one.text for one in problems],
        }
    )
