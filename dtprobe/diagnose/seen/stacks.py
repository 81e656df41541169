"""Stacks of threads, each with its artifact and rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dtprobe.diagnose.case import Artifact, Line, Quote, Role
from dtprobe.diagnose.seen.places import Places
from dtprobe.diagnose.seen.tables import told_rank
from dtprobe.readers import faulthandler, gdb, pyspy_threads
from dtprobe.readers.artifact import Problem, Problems, ReaderError, read_text
from dtprobe.readers.threads import Snapshot, Thread

MOST_BYTES = 32 << 20
_HEADS = (
    "Process ",
    "Thread ",
    "Fatal Python error",
    "Timeout (",
    "Current thread ",
    "TID ",
    "(gdb) attach",
    "Core was",
    "Attaching to",
)
_NUMBERED = re.compile(r"\.(\d{1,4})(?:\.\w+)?$")
_FORMS: tuple[tuple[Callable[[str], bool], Callable[..., Iterator[Snapshot]]], ...] = (
    (faulthandler.is_head, faulthandler.from_faulthandler),
    (gdb.is_head, gdb.from_gdb),
    (pyspy_threads.is_head, pyspy_threads.from_text),
)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The threads of one process as one tool saw them. `rank` is the rank of the process, or of the rank that it descends from."""

    snapshot: Snapshot
    artifact: Artifact
    rank: int | None
    child: bool = False
    """Whether the process is not the rank's own but a child of it: a loader's worker, a helper."""

    @property
    def main(self) -> Thread | None:
        """The main thread: the one of that name, else the process's own number, else the only one."""
        threads = self.snapshot.threads
        for one in threads:
            if one.name == "MainThread":
                return one
        for one in threads:
            if one.tid is not None and one.tid == self.snapshot.pid:
                return one
        current = [one for one in threads if one.current]
        if current:
            return current[0]
        if not threads:
            return None
        return threads[-1] if self.snapshot.tool == "faulthandler" else threads[0]

    def quote(self, thread: Thread, frame: str | None, role: Role) -> Quote:
        """A frame, else a thread, as evidence."""
        line = thread.line
        text = frame or (thread.frames[0] if thread.frames else "a thread without frames")
        if frame in thread.frames and len(thread.frame_lines) == len(thread.frames):
            line = thread.frame_lines[thread.frames.index(frame)]
        return Quote(file=self.artifact.name, line=line, text=text[:400], role=role)


def take(artifacts: Sequence[Artifact], lines: Mapping[str, Sequence[Line]], places: Places, problems: Problems) -> list[Stack]:
    """All stacks, in the order of the artifacts."""
    found = list(_stacks(artifacts, lines, places, problems))
    seats = {seat.rank: seat.pid for seat in places.who.seats if seat.pid is not None}
    # a child is forked after its rank's process: where nothing else tells them apart, the first number is the rank's
    own = {
        rank: seats.get(rank) or min(one.snapshot.pid for one in found if one.rank == rank and one.snapshot.pid is not None)
        for rank in {one.rank for one in found if one.rank is not None and one.snapshot.pid is not None}
        if rank is not None
    }
    return [replace(one, child=one.snapshot.parent is not None or _is_child(one, own)) for one in found]


def _is_child(one: Stack, own: Mapping[int, int]) -> bool:
    known = own.get(one.rank) if one.rank is not None else None
    return known is not None and one.snapshot.pid is not None and one.snapshot.pid != known


def _stacks(
    artifacts: Sequence[Artifact], lines: Mapping[str, Sequence[Line]], places: Places, problems: Problems
) -> Iterator[Stack]:
    for one in artifacts:
        own = lines.get(one.name, ())
        heads = [line.text for line in own if line.text.startswith(_HEADS)]
        for is_head, parse in _FORMS:
            if any(is_head(text) for text in heads):
                for snapshot in parse((line.number, line.text) for line in own):
                    yield Stack(snapshot=snapshot, artifact=one, rank=_rank(snapshot, one, own, places))
        if one.kind == "pyspy-json" or (
            own and own[0].text.lstrip()[:1] in ("[", "{") and any('"frames"' in line.text for line in own[:200])
        ):
            try:
                for snapshot in pyspy_threads.from_json(Path(one.name), read_text(one.path, MOST_BYTES, problems), problems):
                    yield Stack(snapshot=snapshot, artifact=one, rank=_rank(snapshot, one, own, places))
            except ReaderError as error:
                problems.append(Problem(one.name, "unreadable", str(error)))


def _rank(snapshot: Snapshot, artifact: Artifact, lines: Sequence[Line], places: Places) -> int | None:
    """By the process's number, else its parent's, the line of the log that it stands in, the artifact's name."""
    for pid in (snapshot.pid, snapshot.parent):
        if (rank := places.rank(pid, artifact.host)) is not None:
            return rank
    if (
        snapshot.command
        and snapshot.parent is None
        and (rank := told_rank(snapshot.command, artifact.host, places)) is not None
    ):
        return rank
    if snapshot.line is not None:
        at = next((line for line in lines if line.number == snapshot.line), None)
        if at is not None and at.rank is not None:
            return at.rank
    if artifact.rank is not None:
        return artifact.rank
    numbered = _NUMBERED.search(artifact.name)
    if numbered and int(numbered[1]) != snapshot.pid and (places.world_size is None or int(numbered[1]) < places.world_size):
        return int(numbered[1])
    return None
