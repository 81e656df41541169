"""What all readers share: how a file is opened, what went wrong with it, and whose it is."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from dtprobe.errors import DtprobeError

INT64 = 2**63


class ReaderError(DtprobeError):
    """The artifact holds nothing that this reader can read: missing, empty of its format, refused, of another kind."""


@dataclass(frozen=True)
class Problem:
    """A part of an artifact that could not be read. `kind` is one word: cut, noise, refused, unreadable, incomplete, clock."""

    source: str
    kind: str
    text: str


Problems = list[Problem]
"""Where a reader says what it could not read: pass an empty list, look into it afterwards."""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file, open for reading bytes. Raises ReaderError, also for what fails while it is read.

    Only regular files are opened: a named pipe in a folder of artifacts would block for ever.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ReaderError(f"{path} is not a regular file", "give the artifact itself")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ReaderError(f"cannot read {path}: {error.strerror or error}", "check the path and its permissions") from error


def read_bytes(path: Path, limit: int | None = None, problems: Problems | None = None) -> bytes:
    """The file's content, at most `limit` bytes of it (then a problem `cut` says so). Raises ReaderError."""
    with opened(path) as file:
        data = file.read() if limit is None else file.read(limit)
        if limit is not None and file.read(1):
            note(problems, path, "cut", f"only the first {limit} bytes were read")
        return data


def read_text(path: Path, limit: int | None = None, problems: Problems | None = None) -> str:
    """The file as text; bytes that are not UTF-8 become U+FFFD. Raises ReaderError."""
    return read_bytes(path, limit, problems).decode("utf-8", "replace")


def note(problems: Problems | None, path: Path, kind: str, text: str) -> None:
    """Add a problem, where the caller wants to hear of them."""
    if problems is not None:
        problems.append(Problem(str(path), kind, one_line(text)))


def one_line(text: str, width: int = 200) -> str:
    """The text on one line, control characters escaped, cut at `width` characters."""
    flat = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text[: width + 1])
    return flat if len(flat) <= width else flat[:width] + "..."


_NAMED = re.compile(r"rank[_.-]?([0-9]{1,7})(?![0-9])", re.IGNORECASE)


def rank_of(path: PurePath, also: str | None = None) -> int | None:
    """The rank that an artifact's name or folder gives: `rank3.txt`, `nccl_trace_rank_3`, `rank3/fr-0.json`.

    Of the folders only the nearest two count, and only where the file's own name has no `rank`. `also` is a pattern with one
    group for names that give the rank otherwise (`_dump_3`).
    """
    found = _NAMED.findall(path.name)
    if found:
        return int(found[-1])
    for folder in path.parts[-2:-4:-1]:
        match = _NAMED.fullmatch(folder)
        if match:
            return int(match[1])
    match = re.search(also, path.name) if also else None
    return int(match[1]) if match else None


def as_int(value: Any) -> int | None:
    """The integer, if it is one that an Int64 column can hold, else None."""
    if isinstance(value, bool) or not isinstance(value, int) or not -INT64 <= value < INT64:
        return None
    return value


def as_float(value: Any) -> float | None:
    """The number as a float, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def as_text(value: Any) -> str | None:
    """The string, else None."""
    return value if isinstance(value, str) else None


def as_bool(value: Any) -> bool | None:
    """The truth value, else None."""
    return value if isinstance(value, bool) else None


def load_json(text: str | bytes) -> Any:
    """The JSON value. Raises ValueError for whatever is wrong with it, also for nesting beyond the interpreter's limit."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def json_lines(path: Path, problems: Problems | None = None) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines. A cut last line or other broken ones become one problem. Raises ReaderError."""
    lines = read_bytes(path).split(b"\n")
    found: list[dict[str, Any]] = []
    broken: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = load_json(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            broken.append(number)
    if broken and not found:
        raise ReaderError(f"{path} is not JSON lines: no object in {len(broken)} lines", "give a .jsonl file")
    if broken == [len(lines)]:
        note(problems, path, "cut", f"line {len(lines)}, the last, is cut")
    elif broken:
        note(
            problems, path, "noise", f"{len(broken)} of {len(lines)} lines are not JSON objects, the first is line {broken[0]}"
        )
    return found
