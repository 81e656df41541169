"""Tracebacks behind a logger's own prefix on each line, and those that a tag stands before only on their first line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dtprobe.diagnose.lines.envelope import Envelope

HEAD = "Traceback (most recent call last)"
LONGEST = 200
"""A prefix of a logger is shorter."""
_CHAINED = ("During handling of the above", "The above exception was")
_EXCEPTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:: |:?$)")

_Key = tuple[int | None, int | None, str | None, int | None]


@dataclass(slots=True)
class Unwrapper:
    """Reads the lines of one artifact in their order."""

    _prefixes: dict[_Key, re.Pattern[str]] = field(default_factory=dict)
    _open: set[_Key] = field(default_factory=set)
    _bare: bool = False
    _indented: bool = False

    def unwrap(self, found: Envelope) -> bool:
        """Takes the prefix off a line of a traceback. Whether the line ends one that only its first line has a tag for."""
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
