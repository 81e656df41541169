"""What a client of a network file system remembers of names, attributes and listings, and what it then tells wrongly.

The kernel is told to remember nothing, so that every question comes here: each stale answer is seen, and is evidence.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dtprobe.inject.helper import Log, Part

Attributes = Mapping[str, int]
ANSWERS_MAX = 100_000
"""So many answers of each kind are remembered; the oldest go first, as under memory pressure in a real client."""

CHANGED = ("st_ino", "st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_mtime", "st_ctime")
Key = tuple[str, str]


@dataclass
class Answer:
    """What was found at the time `at` (monotonic); `stale` counts how often it was told after it had become wrong."""

    at: float
    value: Any
    stale: int = 0
    began: float = 0.0
    number: str | None = None
    detail: str = ""


class Memory:
    """One `cache` fault in one rank's view. Used from any thread."""

    def __init__(self, part: Part, rank: int | None, meant: Callable[[str], bool], log: Log) -> None:
        self.close_to_open: bool = part["cto"]
        self._part = part
        self._rank = rank
        self._meant = meant
        self._log = log
        self._lock = threading.Lock()
        self._answers: dict[Key, Answer] = {}

    def attributes(self, path: str, fetch: Callable[[], Attributes]) -> Attributes:
        """The attributes of a path as this client believes them to be; raises OSError (ENOENT) where it believes in nothing."""
        if not self._meant(path):
            self.forget(path)
            return fetch()

        def look() -> Attributes | None:
            try:
                return fetch()
            except FileNotFoundError:
                return None

        found = self._answer(("getattr", path), look(), self._kept_attributes)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, path)
        return found

    def listing(self, path: str, fetch: Callable[[], list[Any]]) -> list[Any]:
        """The names in a folder as this client believes them to be."""
        if not self._meant(path):
            self.forget(path)
            return fetch()
        kept = "entry" in self._part["what"]
        return self._answer(("readdir", path), sorted(fetch()), lambda _old, _new: kept)

    def forget(self, *paths: str) -> None:
        """What the client does itself it knows."""
        with self._lock:
            for path in paths:
                for call in ("getattr", "readdir"):
                    self._end(self._answers.pop((call, path), None))

    def close(self) -> None:
        """Nothing is told from memory any more."""
        with self._lock:
            for answer in self._answers.values():
                self._end(answer)
            self._answers.clear()

    def _answer(self, key: Key, truth: Any, kept: Callable[[Any, Any], bool]) -> Any:
        now = time.monotonic()
        with self._lock:
            answer = self._answers.get(key)
            if answer is not None and now - answer.at < self._part["seconds"]:
                if _same(answer.value, truth):
                    return answer.value
                if kept(answer.value, truth):
                    self._stale(key, answer, now)
                    return answer.value
            self._end(self._answers.pop(key, None))
            if len(self._answers) >= ANSWERS_MAX:
                self._end(self._answers.pop(next(iter(self._answers))))
            self._answers[key] = Answer(now, truth)
            return truth

    def _kept_attributes(self, old: Attributes | None, new: Attributes | None) -> bool:
        """Whether an answer of this kind is still told although another one would be right."""
        if old is None:
            return "negative" in self._part["what"]
        same_file = new is not None and new["st_ino"] == old["st_ino"]
        return ("attr" if same_file else "entry") in self._part["what"]

    def _stale(self, key: Key, answer: Answer, now: float) -> None:
        call, path = key
        answer.stale += 1
        if answer.stale == 1:
            answer.began = now
            answer.detail = f"{path}: {_words(call, answer.value)}, as it was {now - answer.at:.3f} s before"
            answer.number = self._log.fired(self._part["index"], self._rank, call=call, detail=answer.detail)

    def _end(self, answer: Answer | None) -> None:
        if answer is not None and answer.stale:
            told_s = time.monotonic() - answer.began
            times = "once" if answer.stale == 1 else f"{answer.stale} times"
            self._log.ended(answer.number, f"{answer.detail}; told {times} in {told_s:.3f} s")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(one[name] == other[name] for name in CHANGED)
    return bool(one == other)


def _words(call: str, value: Any) -> str:
    if value is None:
        return "no such file"
    return f"{len(value)} names" if call == "readdir" else f"{value['st_size']} bytes"
