"""Where artifacts are read, one by one: in this process, or by tasks of an engine (`diagnose.cut`). What is made of them is the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from dtprobe.diagnose import lines
from dtprobe.diagnose.analysts.collectives import recording
from dtprobe.diagnose.analysts.collectives.recording import Dump
from dtprobe.diagnose.case import Artifact
from dtprobe.diagnose.lines import Read, Reading
from dtprobe.readers.artifact import Problem
from dtprobe.readers.flight_columns import Tables


class Pieces(Protocol):
    """What was read of each artifact, in the order in which reading was asked for; each is given once."""

    def lines(self) -> Iterable[Read]:
        """Of the text artifacts."""

    def dumps(self, tables: Tables) -> Iterable[Dump]:
        """Of the flight recorders' dumps; what their calls have in common goes to `tables`."""

    def lost(self) -> Sequence[Problem]:
        """What was not read although it could have been; known once all of it was asked for."""


class Reader(Protocol):
    """Reads all of them."""

    def __call__(self, texts: Sequence[Reading], dumps: Sequence[Artifact]) -> AbstractContextManager[Pieces]: ...


@contextmanager
def here(texts: Sequence[Reading], dumps: Sequence[Artifact]) -> Iterator[Pieces]:
    """Read them in this process, each when it is asked for."""
    yield _Here(texts, dumps)


@dataclass(frozen=True)
class _Here:
    texts: Sequence[Reading]
    all_dumps: Sequence[Artifact]

    def lines(self) -> Iterator[Read]:
        return map(lines.read, self.texts)

    def dumps(self, tables: Tables) -> Iterator[Dump]:
        return (recording.read(one, tables) for one in self.all_dumps)

    def lost(self) -> tuple[Problem, ...]:
        return ()
