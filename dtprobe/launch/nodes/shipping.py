"""Artifacts on their way from a node: files below its folder, sent as they grow, so that a node that vanishes has left what it had."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

PART = 256 << 10
GROWING = (".jsonl", ".log")
"""Only ever appended to: their tail is enough. Anything else is sent whole."""

LATER = 1 << 20
"""A larger file that does not merely grow is sent once, at the end."""


@dataclass
class _Sent:
    inode: int
    size: int
    changed_ns: int


class Shipper:
    """Sends what is new below `folder`. `send` takes the parts of a file as keyword arguments, and says whether they went."""

    def __init__(self, folder: Path, send: Callable[..., bool]) -> None:
        self._folder = folder
        self._send = send
        self._sent: dict[str, _Sent] = {}

    def ship(self, *, last: bool = False) -> None:
        """Send all that has changed since the last time; at the end also what was put off."""
        for where, _, names in os.walk(self._folder):
            for name in names:
                path = Path(where, name)
                # a name with a dot in front is a file that is being written, to be renamed at one stroke
                if not name.startswith("."):
                    with suppress(FileNotFoundError):
                        self._file(path, path.relative_to(self._folder).as_posix(), last)

    def _file(self, path: Path, name: str, last: bool) -> None:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return
        known = self._sent.get(name)
        same = known is not None and known.inode == status.st_ino
        if same and known and known.size == status.st_size and known.changed_ns == status.st_mtime_ns:
            return
        tail = same and known is not None and name.endswith(GROWING) and status.st_size >= known.size
        if not last and not name.endswith(GROWING) and status.st_size > LATER:
            return
        at = known.size if tail and known else 0
        with path.open("rb") as file:
            file.seek(at)
            fresh = not tail
            while True:
                part = file.read(PART)
                if not part and not fresh:
                    break
                if not self._send(file=name, at=at, fresh=fresh, data=base64.b64encode(part).decode("ascii")):
                    return
                at += len(part)
                fresh = False
        self._sent[name] = _Sent(status.st_ino, at, status.st_mtime_ns)


def take(folder: Path, part: Mapping[str, Any]) -> None:
    """Write a part of a file below `folder`. Raises ValueError for a name that leads out of it, OSError where it cannot be written."""
    name = PurePosixPath(part["file"])
    if name.is_absolute() or ".." in name.parts or not name.parts:
        raise ValueError(f"{part['file']!r} leads out of the folder")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{part['file']!r} leads out of the folder")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_TRUNC if part["fresh"] else 0)
    handle = os.open(path, flags, 0o644)
    try:
        data, at = base64.b64decode(part["data"]), int(part["at"])
        while data:
            written = os.pwrite(handle, data, at)
            data, at = data[written:], at + written
    finally:
        os.close(handle)
