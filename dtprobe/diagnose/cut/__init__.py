"""A postmortem of more artifacts than one machine should read: cut into shares, read by the tasks of an engine, put together here.

Each task reads its range of files (`task`), exactly as one machine would read them all, and leaves a compact partial result (`parts`);
these are put together one artifact at a time, in the artifacts' order, so that the answer is the same to the letter. What is not cut
is done here: listing the files and a look at their first bytes, what lies in archives, RAS answers and py-spy's JSON, second dumps of a
rank, and joining it all.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from dtprobe.diagnose import lines
from dtprobe.diagnose.analysts.collectives import recording
from dtprobe.diagnose.analysts.collectives.recording import Dump
from dtprobe.diagnose.case import Artifact
from dtprobe.diagnose.cut import parts
from dtprobe.diagnose.cut.shares import Share, Unit, cut, mark, packed
from dtprobe.diagnose.lines import Read, Reading
from dtprobe.diagnose.pieces import Pieces
from dtprobe.diagnose.who import ranges
from dtprobe.engines import Done, Engine, Task
from dtprobe.errors import DtprobeError, UsageError
from dtprobe.readers.artifact import Problem, one_line
from dtprobe.readers.flight_columns import Tables
from dtprobe.scratch import HIDDEN, scratch

VERB = "postmortem-share"
"""The command of a task, which `--help` does not list."""
BRINGS = "part"
START_S, SLOWER = 600.0, 20.0
"""A task's time: to start, and so many times what its share takes on one core here."""

_T = TypeVar("_T", Read, Dump)


@dataclass(frozen=True, kw_only=True)
class OnEngine:
    """A `pieces.Reader` whose tasks run on an engine.

    `roots` are the paths that the user gave, `base` a folder for what comes back, which for Slurm its nodes share. `pieces` says how
    many shares; without it their sizes decide. `tell` hears how many are read.
    """

    engine: Engine
    roots: Sequence[Path]
    base: Path
    pieces: int | None = None
    tell: Callable[[str], None] = lambda _text: None

    @contextmanager
    def __call__(self, texts: Sequence[Reading], dumps: Sequence[Artifact]) -> Iterator[Pieces]:
        """Raises DtprobeError where no share was read, UsageError where `base` cannot be written to; else what was not read is a problem."""
        roots = [one.absolute() for one in self.roots]
        units: list[Unit] = [one for one in texts if not _of_archive(one.artifact)]
        units += [one for one in dumps if not _of_archive(one)]
        shares = cut(units, roots, self.pieces)
        with _scratch(self.base) as folder:
            yield _Joined(texts, dumps, self._read(shares, folder / "parts"))

    def _read(self, shares: Sequence[Share], into: Path) -> list[_Part]:
        """Let all be read; where what came back lies, or why nothing did."""
        found = {
            f"share-{number:04}": _Part(share, packed(share), into / f"share-{number:04}")
            for number, share in enumerate(shares)
        }
        tasks = [
            Task(id=name, argv=(VERB, one.text, BRINGS), timeout_s=START_S + SLOWER * one.share.cost_s, brings=BRINGS)
            for name, one in found.items()
        ]
        ends: dict[str, Done] = {}

        def ended(done: Done) -> None:
            ends[done.task] = done
            self.tell(f"{len(ends)} of {len(tasks)} shares read on {self.engine.name}")

        if tasks:
            self.tell(f"reading {len(tasks)} share{'s' * (len(tasks) != 1)} on {self.engine.name}")
            self.engine.run(tasks, into=into, ended=ended)
            # an engine runs again what a vanished node takes with it, and not what somebody killed there
            if killed := [one for one in tasks if (ends[one.id].exit_code or 0) < 0]:
                self.engine.run(killed, into=into, ended=ended)
        for name, done in ends.items():
            found[name].problem = _why(done)
        if ends and all(one.problem for one in found.values()):
            wrong = all(one.exit_code == UsageError.exit_code for one in ends.values())
            text = f"--on {self.engine.name}: nothing was read: {next(iter(found.values())).problem}"
            raise UsageError(text) if wrong else DtprobeError(text)
        return list(found.values())


@dataclass
class _Part:
    """A share and what became of it; `problem` is empty where it was read."""

    share: Share
    text: str
    folder: Path
    problem: str = ""
    unread: list[Artifact] = field(default_factory=list)

    def lines(self) -> Iterator[Read]:
        read = () if self.problem else parts.read_lines(self.share.texts, self.folder, mark(self.text))
        return self._whole(read, [one.artifact for one in self.share.texts], lambda _: Read())

    def dumps(self, tables: Tables, shared: parts.Shared) -> Iterator[Dump]:
        read = () if self.problem else parts.read_dumps(self.share.dumps, tables, shared, self.folder, mark(self.text))
        return self._whole(read, self.share.dumps, Dump)

    def _whole(self, found: Iterable[_T], artifacts: Sequence[Artifact], nothing: Callable[[Artifact], _T]) -> Iterator[_T]:
        """What was found, and nothing of the artifacts behind the point from which on the part cannot be read."""
        given = 0
        try:
            for one in found:
                yield one
                given += 1
        except parts.BrokenPart as error:
            self.problem = f"what came back cannot be read: {error.message}"
        for artifact in artifacts[given:]:
            self.unread.append(artifact)
            yield nothing(artifact)


@dataclass(frozen=True)
class _Joined:
    """What all shares gave, in the order of the artifacts; what is in no share (it lies in archives) is read in between."""

    texts: Sequence[Reading]
    all_dumps: Sequence[Artifact]
    parts: Sequence[_Part]

    def lines(self) -> Iterator[Read]:
        shared = {one.artifact.path for part in self.parts for one in part.share.texts}
        found = (read for part in self.parts for read in part.lines())
        for one in self.texts:
            yield next(found) if one.artifact.path in shared else lines.read(one)
        yield from found  # nothing more: it closes the last file

    def dumps(self, tables: Tables) -> Iterator[Dump]:
        shared = {one.path for part in self.parts for one in part.share.dumps}
        same = parts.Shared()
        found = (dump for part in self.parts for dump in part.dumps(tables, same))
        for one in self.all_dumps:
            yield next(found) if one.path in shared else recording.read(one, tables)
        yield from found

    def lost(self) -> list[Problem]:
        return [_lost(part) for part in self.parts if part.unread]


def _lost(part: _Part) -> Problem:
    """Which files, of which ranks, and why."""
    first, last = part.unread[0].name, part.unread[-1].name
    files = first if first == last else f"{first} to {last}, {len(part.unread):,} files"
    ranks = sorted({rank for one in part.unread if (rank := recording.rank_named(one)) is not None})
    whose = f"rank{'s' * (len(ranks) != 1)} {ranges(ranks)}: " if ranks else ""
    return Problem(files, "unreadable", f"{whose}not read: {part.problem}")


def _why(done: Done) -> str:
    """Why a task gave nothing, on one line; empty where it ended well."""
    if done.exit_code == 0:
        return ""
    said = [one for one in done.stderr.splitlines() if one.strip()]
    code = done.exit_code or 0
    how = f"by signal {-code} ({signal.strsignal(-code)}), twice" if code < 0 else f"with code {code}"
    why = done.problem or (said[-1] if said and code > 0 else f"its task ended {how}")
    where = f" (on {done.host})" if done.host and done.host not in why else ""
    return one_line(f"{why.removeprefix('dtprobe: ')}{where}", 400)


def _of_archive(artifact: Artifact) -> bool:
    """Whether it was unpacked, to where nobody else sees it: intake tells of no such file when it was written."""
    return artifact.near_ns is None


@contextmanager
def _scratch(base: Path) -> Iterator[Path]:
    with ExitStack() as held:
        try:
            folder = held.enter_context(scratch(base, HIDDEN))
        except OSError as error:
            raise UsageError(
                f"{base}: no folder for partial results can be made there: {error.strerror or error}", "give --out DIR"
            ) from error
        yield folder
