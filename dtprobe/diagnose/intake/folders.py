"""Regular files below a folder, counted all, kept some: a million of them cost bounded memory."""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from dtprobe.readers.artifact import Problem, Problems
from dtprobe.scratch import HIDDEN

MOST_FILES = 20_000
"""So many files are opened; where there are more, the largest."""
_MOST_FOLDERS = 200_000


@dataclass(slots=True)
class Listed:
    """The files by path, and what else lay there."""

    files: list[Path]
    seen: int = 0
    others: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)


def listed(root: Path, problems: Problems, most: int = MOST_FILES) -> Listed:
    """The regular files at or below a folder, links not followed. What cannot be listed or is no file becomes a problem."""
    found: list[tuple[int, str]] = []
    told = Listed([])
    folders = [os.fspath(root)]
    seen_folders = 0
    while folders:
        folder = folders.pop()
        seen_folders += 1
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    _entry(entry, found, folders, told)
                    if len(found) >= 2 * most:
                        found = sorted(found)[:most]
        except OSError as error:
            problems.append(Problem(shown(os.path.relpath(folder, root)), "unreadable", error.strerror or str(error)))
        if len(folders) + seen_folders > _MOST_FOLDERS:
            problems.append(
                Problem(shown(os.fspath(root)), "cut", f"more than {_MOST_FOLDERS:,} folders: the others were not looked into")
            )
            break
    if told.seen > most:
        found = sorted(found)[:most]
        problems.append(Problem(shown(root.name), "cut", f"{told.seen:,} files: only the {most:,} largest were opened"))
    for what, count in told.others.items():
        more = f" and {count - 1:,} more" if count > 1 else ""
        problems.append(Problem(shown(os.path.relpath(told.examples[what], root)) + more, "refused", f"{what}: not opened"))
    told.files = [Path(path) for _, path in sorted(found, key=lambda one: one[1])]
    return told


def _entry(entry: os.DirEntry[str], found: list[tuple[int, str]], folders: list[str], told: Listed) -> None:
    if entry.is_dir(follow_symlinks=False):
        if not entry.name.startswith(HIDDEN):
            folders.append(entry.path)
        return
    status = entry.stat(follow_symlinks=False)
    if stat.S_ISREG(status.st_mode):
        told.seen += 1
        found.append((-status.st_size, entry.path))
        return
    what = "a link" if stat.S_ISLNK(status.st_mode) else "a named pipe" if stat.S_ISFIFO(status.st_mode) else "no regular file"
    told.others[what] += 1
    told.examples.setdefault(what, entry.path)


def shown(name: str) -> str:
    """A name that can be printed: bytes that are no UTF-8 and control characters escaped, so that it stays on one line."""
    plain = name.encode("utf-8", "backslashreplace").decode()
    return plain if plain.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in plain)
