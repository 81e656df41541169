"""What happened to files: inotifywait's output in its common formats, and our own recorder's."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from dtprobe.readers.artifact import Problems, ReaderError, load_json, note, one_line, rank_of, read_text
from dtprobe.readers.schema import Schema

SCHEMA = Schema("file_events", {"path": "string", "holders": "string", "names": "string"})
"""`kind` is the event in lower case (create, modify, close_write, moved_to, ...; of several the one that says most), `names` all of
them separated by commas. `path` is the file, or the watched folder for an event on itself. `holders` is a JSON list of
[pid, command, descriptor] that had the file open just then, null where nobody looked."""

LIMIT = 256 << 20
_WORD = (
    r"(?:IN_)?(?:ACCESS|MODIFY|ATTRIB|CLOSE_WRITE|CLOSE_NOWRITE|CLOSE|OPEN|MOVED_FROM|MOVED_TO|MOVE_SELF|MOVE|CREATE|DELETE|"
    r"DELETE_SELF|UNMOUNT|Q_OVERFLOW|IGNORED|ISDIR|ONESHOT)"
)
_EVENTS = rf"{_WORD}(?:[,|:]{_WORD})*"
_VAGUE = ("ISDIR", "CLOSE", "ONESHOT", "MOVE")
_STAMP = r"(?P<epoch>[0-9]{9,10})(?:\.(?P<part>[0-9]{1,9}))?"
_OURS = re.compile(rf"^{_STAMP} (?P<path>.*) (?P<events>{_EVENTS}) (?P<holders>-|\[.*\])$")
_CLOCK = r"(?P<clock>(?:[0-9]{2,4}[-/.][0-9]{1,2}[-/.][0-9]{2,4}[ T])?[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?(?:\.[0-9]+)?)"
_TIMED_TAIL = re.compile(rf"^(?:{_STAMP}|{_CLOCK}) (?P<path>\S.*) (?P<events>{_EVENTS})$")
_PLAIN = re.compile(rf"^(?![0-9]{{9,10}}(?:\.[0-9]+)? )(?P<folder>\S.*?/?) (?P<events>{_EVENTS})(?: (?P<file>.*))?$")
_REMARKS = re.compile(r"^(?:Setting up watches|Watches established|Couldn't watch|Failed to watch|upper limit on inotify)")


def read_inotify(path: Path, rank: int | None = None, problems: Problems | None = None) -> pd.DataFrame:
    """inotifywait's text as `file_events`.

    Reads the default format, `--csv`, `--timefmt %s --format '%T %w %f %e'` and `'%T %w%f %e'`, and our recorder's
    `<seconds> <path> <EVENTS> <holders or ->`. Times other than seconds since the epoch are of an unknown zone: null. A path
    with spaces is read in all of them; with `'%T %w %f %e'` the first "/ " is taken for the end of the folder.
    Raises ReaderError for files that hold no event.
    """
    rows: list[dict[str, object]] = []
    noise: list[int] = []
    lines = read_text(path, LIMIT, problems).splitlines()
    clocks = 0
    for number, line in enumerate(lines, 1):
        if not line.strip() or _REMARKS.match(line):
            continue
        row = next((made for read in _FORMS if (made := read(line)) is not None), None)
        if row is None:
            noise.append(number)
            continue
        clocks += bool(row.pop("clock", None))
        rows.append(row)
    if noise and not rows:
        text = one_line(lines[noise[0] - 1], 80)
        raise ReaderError(f"{path} is not inotifywait output: none of its {len(lines)} lines is", f"line {noise[0]}: {text}")
    if noise == [len(lines)]:
        note(problems, path, "cut", f"line {len(lines)}, the last, is cut")
    elif noise:
        note(problems, path, "noise", f"{len(noise)} of {len(lines)} lines are no events, the first is line {noise[0]}")
    if clocks:
        note(problems, path, "clock", f"{clocks} times are not seconds since the epoch: t_ns is null there")
    columns = {name: [row.get(name) for row in rows] for name in ("t_ns", "kind", "path", "holders", "names")}
    return SCHEMA.frame({**columns, "rank": rank if rank is not None else rank_of(path), "source": str(path)})


def _row(path: str, events: Iterable[str], t_ns: int | None = None, holders: str | None = None) -> dict[str, object]:
    words = [word.removeprefix("IN_") for word in events]
    kind = next((word for word in words if word not in _VAGUE), words[0])
    return {"t_ns": t_ns, "path": path, "kind": kind.lower(), "names": ",".join(words).lower(), "holders": holders}


def _stamp(match: re.Match[str]) -> int | None:
    return int(match["epoch"]) * 10**9 + int((match["part"] or "").ljust(9, "0")) if match["epoch"] else None


def _ours(line: str) -> dict[str, object] | None:
    match = _OURS.match(line)
    if match is None:
        return None
    holders: str | None = match["holders"]
    if holders is not None and holders != "-":
        try:
            load_json(holders)
        except ValueError:
            return None
    return _row(match["path"], _words(match["events"]), _stamp(match), None if holders == "-" else holders)


def _timed(line: str) -> dict[str, object] | None:
    match = _TIMED_TAIL.match(line)
    if match is None:
        return None
    folder, slash, name = match["path"].partition("/ ")
    row = _row(folder + slash.rstrip() + name, _words(match["events"]), _stamp(match))
    return row | {"clock": match["clock"]}


def _csv(line: str) -> dict[str, object] | None:
    try:
        fields = next(csv.reader([line], strict=True), [])
    except csv.Error:
        return None
    # a default line with three events, "folder OPEN,CLOSE,ISDIR file", has three fields too
    if len(fields) != 3 or not re.fullmatch(_EVENTS, fields[1]) or re.search(rf" {_EVENTS}$", fields[0]):
        return None
    return _row(fields[0] + fields[2], _words(fields[1]))


def _plain(line: str) -> dict[str, object] | None:
    match = _PLAIN.match(line)
    return _row(match["folder"] + (match["file"] or ""), _words(match["events"])) if match else None


def _words(events: str) -> list[str]:
    return re.split("[,|:]", events)


_FORMS: tuple[Callable[[str], dict[str, object] | None], ...] = (_ours, _timed, _csv, _plain)
