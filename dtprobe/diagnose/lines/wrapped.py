"""Tracebacks within something else: behind a logger's prefix on each line, with a tag on their first line only, in a table of elastic
or below a line of `mp.spawn` that says whose they are, in elastic's error files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from dtprobe.diagnose.lines.envelope import Envelope

HEAD = "Traceback (most recent call last)"
LONGEST = 200
"""A prefix of a logger is shorter."""
_CHAINED = ("During handling of the above", "The above exception was")
_EXCEPTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:: |:?$)")

_ROW = re.compile(r"\s+(?P<key>time|host|rank|exitcode|traceback)\s*: (?P<value>.*)$")
_ROW_RANK = re.compile(r"(?P<rank>\d+) \(local_rank: (?P<local>\d+)\)")
_SPAWNED = re.compile(r"-- Process (?P<index>\d{1,6}) terminated with the following error:")
_INDENT = "  "
"""Of an entry in elastic's table."""

_Key = tuple[int | None, int | None, str | None, int | None]


@dataclass(slots=True)
class _Whose:
    """Whose the next traceback is."""

    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    t_ns: int | None = None
    table: bool = False
    inside: bool = False


@dataclass(slots=True)
class Unwrapper:
    """Reads the lines of one artifact in their order."""

    _prefixes: dict[_Key, re.Pattern[str]] = field(default_factory=dict)
    _open: set[_Key] = field(default_factory=set)
    _bare: bool = False
    _indented: bool = False
    _whose: _Whose | None = None

    def unwrap(self, found: Envelope) -> bool:
        """Takes the prefix off a line of a traceback. Whether the line ends one that only its first line has a tag for."""
        self._entry(found)
        key = (found.rank, found.local_rank, found.host, found.pid)
        at = found.text.find(HEAD)
        if at >= 0:
            self._begin(key, found.text[:at])
            return False
        if key in self._open and (match := self._prefixes[key].match(found.text)):
            self._strip(key, found, found.text[match.end() :])
        return self._ends_bare(key, found.text)

    def _begin(self, key: _Key, before: str) -> None:
        self._bare, self._indented = any(one is not None for one in key), False
        self._open.discard(key)
        if before.strip() and len(before) <= LONGEST:
            self._prefixes[key] = re.compile(re.sub(r"\d+", r"\\d+", re.escape(before.rstrip())) + " ?")
            self._open.add(key)

    def _strip(self, key: _Key, found: Envelope, text: str) -> None:
        inside = not text.strip() or text[0].isspace() or text.startswith(_CHAINED)
        if inside or _EXCEPTION.match(text):
            found.text = text
        if not inside:
            self._open.discard(key)

    def _ends_bare(self, key: _Key, text: str) -> bool:
        if not self._bare:
            return False
        tagged = any(one is not None for one in key)
        if not tagged and (not text.strip() or text[0].isspace()):
            self._indented = True
            return False
        self._bare = False
        return not tagged and self._indented and _EXCEPTION.match(text) is not None

    def _entry(self, found: Envelope) -> None:
        """Follows a table's entry, or what spawn says, and gives its traceback to the rank that it names."""
        text, whose = found.text, self._whose
        if text.startswith("-- P") and (match := _SPAWNED.match(text)):
            self._whose = _Whose(local_rank=int(match["index"]))
        elif text[:1] == " " and ": " in text and (row := _ROW.match(text)):
            self._row(row["key"], row["value"], found)
        elif whose is not None and not whose.inside and text.startswith(HEAD):
            whose.inside = True
            _give(whose, found)
        elif whose is not None and whose.inside:
            self._within(whose, found)

    def _row(self, key: str, value: str, found: Envelope) -> None:
        if key == "time" or self._whose is None or not self._whose.table:
            self._whose = _Whose(table=True)
        whose = self._whose
        if key == "time":
            whose.t_ns = found.t_ns
        elif key == "host":
            whose.host = value.strip() or None
        elif key == "rank" and (match := _ROW_RANK.match(value)):
            whose.rank, whose.local_rank = int(match["rank"]), int(match["local"])
        elif key == "traceback" and value.startswith(HEAD):
            whose.inside = True
            found.text = value
            _give(whose, found)

    def _within(self, whose: _Whose, found: Envelope) -> None:
        text = found.text
        if whose.table and not text.startswith(_INDENT) and text.strip():
            self._whose = None
            return
        found.text = text.removeprefix(_INDENT) if whose.table else text
        _give(whose, found)
        if _EXCEPTION.match(found.text) and not found.text.startswith(_CHAINED):
            self._whose = None


def _give(whose: _Whose, found: Envelope) -> None:
    found.rank = whose.rank if found.rank is None else found.rank
    found.local_rank = whose.local_rank if found.local_rank is None else found.local_rank
    found.host = found.host or whose.host
    if whose.t_ns is not None:
        found.t_ns = whose.t_ns


def error_file(text: str) -> tuple[Sequence[str], int | None]:
    """The lines of the traceback in an error file of elastic's `record`, and when it was written, in UTC nanoseconds."""
    if not text.startswith('{"message"') or "py_callstack" not in text:
        return (), None
    try:
        message = json.loads(text)["message"]
        extra = message["extraInfo"]
        stack, when = extra["py_callstack"], str(extra.get("timestamp", ""))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return (), None
    lines = [one for one in str(stack).splitlines() if one.strip()]
    return lines, int(when) * 10**9 if when.isdigit() and len(when) == 10 else None
