"""What a job left behind, file by file: folders, single files and archives, told apart by their content."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtprobe.diagnose.case import Artifact
from dtprobe.diagnose.intake.kinds import HEAD, kind_of
from dtprobe.diagnose.intake.names import named
from dtprobe.diagnose.lines.stamps import first_date_ns
from dtprobe.errors import UsageError
from dtprobe.readers.artifact import Problem, one_line


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The artifacts in the order of their names, and what could not be read."""

    artifacts: tuple[Artifact, ...]
    problems: tuple[Problem, ...]


def take(paths: Sequence[Path]) -> Taken:
    """Every regular file at or below the paths. Links are not followed. Raises UsageError for a path that does not exist."""
    artifacts: list[Artifact] = []
    problems: list[Problem] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist", "give the folder, files or archive that the job left")
        if path.is_dir():
            for folder, below, names in os.walk(path, onerror=lambda error: problems.append(_unlisted(error))):
                below.sort()
                for name in sorted(names):
                    file = Path(folder, name)
                    if file.is_symlink() or not file.is_file():
                        problems.append(Problem(str(file), "refused", "not a regular file"))
                        continue
                    _add(file, str(file.relative_to(path)), artifacts, problems)
        else:
            _add(path, path.name, artifacts, problems)
    return Taken(artifacts=tuple(artifacts), problems=tuple(problems))


def _unlisted(error: OSError) -> Problem:
    return Problem(str(error.filename), "unreadable", error.strerror or str(error))


def _add(file: Path, name: str, artifacts: list[Artifact], problems: list[Problem]) -> None:
    try:
        with file.open("rb") as stream:
            head = stream.read(HEAD)
        status = file.stat()
    except OSError as error:
        problems.append(Problem(name, "unreadable", one_line(error.strerror or str(error))))
        return
    shown = name.encode("utf-8", "backslashreplace").decode()
    who = named(name)
    artifacts.append(
        Artifact(
            name=shown,
            path=file,
            kind=kind_of(head, status.st_size),
            size=status.st_size,
            rank=who.rank,
            local_rank=who.local_rank,
            dated_ns=first_date_ns(head),
            near_ns=status.st_mtime_ns,
        )
    )
