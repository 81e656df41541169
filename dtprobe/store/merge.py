"""Runs of other machines in this history: each once, under the host that made it, with its folder where that was brought too."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.scratch import scratch
from dtprobe.store import ELSEWHERE, Reading, Store, history
from dtprobe.store.archive import History, rows_of
from dtprobe.store.files import free_bytes, human_bytes, require_folder, writing
from dtprobe.store.places import SUFFIX
from dtprobe.store.rows import table_of
from dtprobe.store.runs import HALF_MADE, RUN_ID, RunFolder, folder_name

if TYPE_CHECKING:
    import pyarrow as pa

DEPTH = 4
"""So deep below a source folders are looked into."""
NAME_ONE = "name a folder of runs, a run folder, a history, an archive of these (tar, zip) or a URL"


@dataclass(frozen=True, kw_only=True)
class Came:
    """How many runs were new, or told more than was known, and how many were known; what could not be read, one line each."""

    new: int
    known: int
    problems: tuple[str, ...]


def merge(sources: Sequence[Path | str], *, out: Path | None = None, into: History | None = None) -> Came:
    """Bring what the sources hold into the folder of runs `out`, or its rows alone into the history `into`.

    A source is a folder of runs, a run folder, a history, an archive (tar, zip) of any of these, or the URL of a history. Run folders are
    copied to where `out` has such; one that is there already stays as it is. Merged again, nothing changes. A run without a verdict is not
    entered; one that says unfinished and has a verdict is one whose history did not answer.

    Raises UsageError for a source that does not exist or where none holds a run, DtprobeError where the history cannot be written.
    """
    import pyarrow as pa

    if out is not None:
        require_folder(out)
        into = Store(out).history
    assert into is not None
    found = _Found()
    with ExitStack() as stack:
        for source in sources:
            found.look(source, stack)
        if not found.tables:
            raise UsageError(found.problems[0] if found.problems else f"{sources[0]} holds no finished run", NAME_ONE)
        every = pa.concat_tables(found.tables)
        new = into.add(every)
        for run in found.runs if out is not None else ():
            _copy(run, out or Path())
    told = set(every.column("run").to_pylist())
    return Came(new=len(new), known=len(told) - len(new), problems=tuple(found.problems))


@dataclass
class _Found:
    """What the sources hold, as it is found."""

    tables: list[pa.Table] = field(default_factory=list)
    runs: list[RunFolder] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def look(self, source: Path | str, stack: ExitStack) -> None:
        """Into one source; what comes out of an archive lies in a folder of the stack's."""
        if "://" in str(source):
            self._take_history(history(str(source)))
            return
        path = Path(source)
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder", NAME_ONE)
        if path.is_file():
            packed, path = path, stack.enter_context(scratch(Path(tempfile.gettempdir()), "dtprobe-merge-"))
            _unpack(packed, path)
        for folder in _below(path, DEPTH):
            try:
                if (folder / "run.json").is_file():
                    self._take_run(folder)
                elif (folder / ELSEWHERE).is_file():
                    self._take_history(history(folder))
                else:
                    self._take_history(History(folder).read())
            except DtprobeError as error:
                told = error.message if str(folder) in error.message else f"{folder}: {error.message}"
                self.problems.append(f"{told} (left out)")

    def _take_history(self, reading: Reading) -> None:
        try:
            self.problems += [f"{one.path}: {one.reason} (left out)" for one in reading.broken]
            table = reading.table()
        finally:
            reading.close()
        if table.num_rows:
            self.tables.append(table)

    def _take_run(self, folder: Path) -> None:
        run = RunFolder.open(folder)
        verdict = run.verdict()
        if verdict is None:
            raise DtprobeError(f"{folder}: {'runs still' if run.running() else run.state}, without a verdict")
        try:
            table = table_of(rows_of(run.facts, verdict))
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # Arrow's own are kinds of these
            raise DtprobeError(
                f"{folder}: run.json or verdict.json is not what a run writes: {type(error).__name__} {error}"
            ) from error
        if not RUN_ID.fullmatch(run.id):
            raise DtprobeError(f"{folder}: {run.id!r} is no id of a run")
        folder_name(str(run.facts["scenario"]), str(run.facts.get("variant") or ""))
        self.tables.append(table)
        self.runs.append(run)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Run folders, histories, and folders that say where theirs is; neither links nor hidden folders are followed, and no run folder entered."""
    if (folder / "run.json").is_file():
        yield folder
        return
    if any(folder.glob(f"[!.]*{SUFFIX}")) or (folder / ELSEWHERE).is_file():
        yield folder
    if not depth:
        return
    for entry in sorted(os.scandir(folder), key=lambda one: one.name):
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from _below(Path(entry.path), depth - 1)


def _unpack(path: Path, into: Path) -> None:
    """Raises UsageError where it is no archive, is cut, leads elsewhere, or is larger than half of what the disk has free."""
    room = free_bytes(into) // 2
    try:
        if tarfile.is_tarfile(path):
            with tarfile.open(path) as tar:
                _has_room(path, sum(member.size for member in tar), room)
                tar.extractall(into, filter="data")
        elif zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                _has_room(path, sum(member.file_size for member in archive.infolist()), room)
                archive.extractall(into)
        else:
            raise UsageError(f"{path}: neither a folder nor an archive that can be opened", NAME_ONE)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise UsageError(f"{path}: cannot be unpacked: {error}", "copy it again, or unpack it and name the folder") from error


def _has_room(path: Path, need: int, room: int) -> None:
    if need > room:
        raise UsageError(
            f"{path}: holds {human_bytes(need)}, the temporary folder has room for {human_bytes(room)}", "set TMPDIR"
        )


def _copy(run: RunFolder, out: Path) -> None:
    """Whole or not at all, as `RunFolder.create` does it."""
    parent = out / folder_name(str(run.facts["scenario"]), str(run.facts.get("variant") or ""))
    place, half_made = parent / run.id, parent / f"{HALF_MADE}{run.id}"
    if place.exists():
        return
    with writing(place):
        parent.mkdir(exist_ok=True)
        shutil.rmtree(half_made, ignore_errors=True)
        try:
            for folder, _, names in os.walk(run.path):
                here = half_made / Path(folder).relative_to(run.path)
                here.mkdir()
                for file in (Path(folder, name) for name in names):
                    if file.is_file() and not file.is_symlink():  # links, sockets and pipes stay where they are
                        shutil.copyfile(file, here / file.name)
            half_made.rename(place)
        finally:
            shutil.rmtree(half_made, ignore_errors=True)
