"""States of processes: samples of /proc, one JSON line each (`proc.jsonl`), the text of `/proc/PID/status`, tables of `ps` and `top`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dtprobe.diagnose.case import Artifact, Line
from dtprobe.diagnose.seen.places import Places
from dtprobe.diagnose.seen.tables import rows
from dtprobe.readers.artifact import as_int, as_text, load_json

_STATUS = re.compile(r"^State:\s*(?P<state>[A-Za-z]) \([a-z ]+\)")
_PID = re.compile(r"^Pid:\s*(?P<pid>\d+)")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look at a process. `state` is the kernel's letter, `wchan` where it sleeps in the kernel, `cpu` percent of a core."""

    rank: int | None
    pid: int | None
    t_ns: int | None
    state: str
    wchan: str | None
    threads: int | None
    fds: int | None
    rss_bytes: int | None
    line: Line
    cpu: float | None = None


def take(artifacts: Sequence[Artifact], lines: Mapping[str, Sequence[Line]], places: Places) -> Iterator[Sample]:
    """All samples, in the order of the artifacts and lines."""
    for one in artifacts:
        own = lines.get(one.name, ())
        if one.kind in ("jsonl", "json") and own and '"wchan"' in own[0].raw and '"state"' in own[0].raw:
            yield from _samples(own, places)
        elif any(line.text.startswith("State:") for line in own[:12]):
            yield from _status(own, places, one)
        elif one.kind in ("text", "stacks"):
            yield from _listed(own, places)


def _listed(lines: Sequence[Line], places: Places) -> Iterator[Sample]:
    """Processes in the tables of a transcript."""
    for row in rows(lines, places):
        if row.state is not None:
            yield Sample(
                rank=row.rank,
                pid=row.pid,
                t_ns=None,
                state=row.state,
                wchan=row.wchan,
                threads=None,
                fds=None,
                rss_bytes=None,
                cpu=row.cpu,
                line=row.line,
            )


def _samples(lines: Sequence[Line], places: Places) -> Iterator[Sample]:
    for line in lines:
        try:
            value = load_json(line.raw)
        except ValueError:
            continue
        if not isinstance(value, dict) or not (state := as_text(value.get("state"))):
            continue
        pid, rank, t_ns = (as_int(value.get(name)) for name in ("pid", "rank", "t_ns"))
        yield Sample(
            rank=rank if rank is not None else places.rank(pid) if places.rank(pid) is not None else line.rank,
            pid=pid,
            t_ns=None if t_ns is None else line.artifact.placed_ns(t_ns),
            state=state[:1],
            wchan=as_text(value.get("wchan")) or None,
            threads=as_int(value.get("threads")),
            fds=as_int(value.get("fds")),
            rss_bytes=as_int(value.get("rss_bytes")) or None,
            line=line,
        )


def _status(lines: Sequence[Line], places: Places, artifact: Artifact) -> Iterator[Sample]:
    """The first process of a `/proc/PID/status` text."""
    state = next((match for line in lines if (match := _STATUS.search(line.text))), None)
    line = next(line for line in lines if line.text.startswith("State:"))
    pid = next((int(match["pid"]) for one in lines if (match := _PID.search(one.text))), None)
    if state is not None:
        rank = places.rank(pid, artifact.host)
        rank = artifact.rank if rank is None else rank
        yield Sample(
            rank=rank, pid=pid, t_ns=None, state=state["state"], wchan=None, threads=None, fds=None, rss_bytes=None, line=line
        )
