"""What a job left behind, file by file: folders, single files and archives, told apart by their content."""

from __future__ import annotations

import os
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dtprobe.diagnose.case import Artifact
from dtprobe.diagnose.intake import folders, kinds
from dtprobe.diagnose.intake.archives import Limits, Unpacker
from dtprobe.diagnose.intake.folders import shown
from dtprobe.diagnose.intake.names import named
from dtprobe.diagnose.lines.stamps import first_date_ns
from dtprobe.errors import UsageError
from dtprobe.readers.artifact import Problem, Problems
from dtprobe.scratch import scratch

LIMITS = Limits()
_SCRATCH = "dtprobe-postmortem-"
_TOLD = 40
"""Problems of one kind that are told one by one."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The artifacts in the order of their names, and what could not be read. `counts` are files by kind."""

    artifacts: tuple[Artifact, ...]
    problems: tuple[Problem, ...]
    counts: Mapping[str, int]


@contextmanager
def taken(paths: Sequence[Path], limits: Limits = LIMITS) -> Iterator[Taken]:
    """Every regular file at or below the paths and in their archives, for as long as the context lasts: what came out of archives
    lies in a temporary folder that goes with it. Links are not followed. Raises UsageError for a path that does not exist.
    """
    roots = [(path, _mode(path)) for path in paths]
    with scratch(Path(tempfile.gettempdir()), _SCRATCH) as unpacked:
        taking = _Taking(unpacked, limits)
        for path, mode in roots:
            if stat.S_ISDIR(mode):
                for file in folders.listed(path, taking.problems).files:
                    taking.add(file, os.path.relpath(file, path))
            elif stat.S_ISREG(mode):
                taking.add(path, path.name)
            else:
                taking.problems.append(Problem(shown(path.name), "refused", "no regular file: not opened"))
        yield Taken(
            artifacts=tuple(taking.artifacts),
            problems=summed(taking.problems),
            counts=dict(Counter(one.kind for one in taking.artifacts)),
        )


def _mode(path: Path) -> int:
    remedy = "give the folder, files or archive that the job left"
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{shown(str(path))} does not exist", remedy) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{shown(str(path))} cannot be read: {getattr(error, 'strerror', None) or error}", remedy) from None


class _Taking:
    """Artifacts as they are found."""

    def __init__(self, scratch: Path, limits: Limits) -> None:
        self.artifacts: list[Artifact] = []
        self.problems: Problems = []
        self._scratch = scratch
        self._limits = limits
        self._unpacker = Unpacker(scratch, self.problems, limits)

    def add(self, path: Path, name: str, depth: int = 0) -> None:
        """One file: an artifact, or the artifacts in it."""
        try:
            with path.open("rb") as stream:
                head = stream.read(kinds.HEAD)
                status = os.fstat(stream.fileno())
        except OSError as error:
            self.problems.append(Problem(shown(name), "unreadable", error.strerror or str(error)))
            return
        kind = kinds.kind_of(head, status.st_size)
        if kind in kinds.PACKED and depth < self._limits.depth:
            for member in self._unpacker.members(path, kind, name):
                self.add(member.path, member.name, depth + 1)
            if path.parent == self._scratch:
                path.unlink()
            return
        if kind in kinds.PACKED:
            self.problems.append(Problem(shown(name), "refused", f"an archive within {depth} others: not unpacked"))
        elif kind in ("7z", "rar"):
            self.problems.append(Problem(shown(name), "unreadable", f"a {kind} archive cannot be read here: unpack it first"))
        who = named(name)
        self.artifacts.append(
            Artifact(
                name=shown(name),
                path=path,
                kind=kind,
                size=status.st_size,
                rank=who.rank,
                local_rank=who.local_rank,
                dated_ns=first_date_ns(head) if kind in kinds.TEXTS else None,
                near_ns=status.st_mtime_ns if depth == 0 else None,
            )
        )


def summed(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """The problems; of a kind that comes by the hundred the first ones, and how many more."""
    told: list[Problem] = []
    count: Counter[tuple[str, str]] = Counter()
    for one in problems:
        count[one.kind, one.text] += 1
        if count[one.kind, one.text] <= _TOLD:
            told.append(one)
    more = [Problem(f"{many - _TOLD:,} more files", kind, text) for (kind, text), many in count.items() if many > _TOLD]
    return (*told, *more)
