"""Logs too large to be read whole: one pass for anchors at constant memory, then the lines around the hits, numbered exactly.

Measured on 300 MB with 130 anchors: the automaton runs at 0.45 GB/s, ripgrep with the same anchors at 0.25 (one core each).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import BinaryIO

from ahocorasick_rs import BytesAhoCorasick, Implementation, MatchKind

from dtprobe.diagnose.case import Artifact
from dtprobe.readers.artifact import opened

CHUNK = 4 << 20
FIRST, LAST = 400, 200
"""So many lines of each anchor are kept from the start of the log, and from its end."""
MOST, FEWEST = 60_000, 2_000
"""Lines that become of a large log: of one alone, and of each where there are many."""
DENSE = 200_000
"""An anchor that stands in more lines than this is looked for no further: the log's tail is read anyway."""
BEFORE, AFTER, LONG_AFTER = 2, 12, 60
_LONG = ("Traceback (most recent call last)",)
HEAD, TAIL = 300, 512 << 10
"""Lines of the log's head and bytes of its tail that are always read."""
_BLOCK = 4 << 10
_PIECE = 16 << 10
_NEWLINE = b"\n"


@lru_cache(maxsize=8)
def _automaton(anchors: tuple[str, ...]) -> BytesAhoCorasick:
    return BytesAhoCorasick(
        [one.encode() for one in anchors], matchkind=MatchKind.LeftmostLongest, implementation=Implementation.DFA
    )


def spans(data: bytes, anchors: tuple[str, ...], side: int, most: int) -> list[tuple[int, int]]:
    """Where the head, the tail and the surroundings of anchors lie in a long line: ascending, without overlap, at most `most`."""
    hits = _automaton(anchors).find_matches_as_indexes(data)
    wanted = [(0, side), *((max(0, start - side), end + side) for _, start, end in hits), (len(data) - side, len(data))]
    merged: list[tuple[int, int]] = []
    for start, end in sorted(wanted):
        if merged and start <= merged[-1][1] and merged[-1][1] - merged[-1][0] < 8 * side:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif not merged or end > merged[-1][1]:
            merged.append((max(start, merged[-1][1]) if merged else start, end))
    return merged if len(merged) <= most else [*merged[: most // 2], *merged[-(most - most // 2) :]]


class _Kept:
    """The hits of each anchor: the first ones and the last ones, as (offset of the hit, line number)."""

    def __init__(self, anchors: Sequence[str]) -> None:
        self.first: list[list[tuple[int, int]]] = [[] for _ in anchors]
        self.last: list[deque[tuple[int, int]]] = [deque(maxlen=LAST) for _ in anchors]
        self.seen = [0] * len(anchors)

    def add(self, anchor: int, offset: int, number: int) -> None:
        self.seen[anchor] += 1
        if len(self.first[anchor]) < FIRST:
            self.first[anchor].append((offset, number))
        else:
            self.last[anchor].append((offset, number))

    def chosen(self, most: int) -> list[tuple[int, int, int]]:
        """Hits in the order of the file, (offset, line number, anchor): the first and last of each anchor, as many as fit."""
        each = [
            [(offset, number, anchor) for offset, number in (*first, *last)]
            for anchor, (first, last) in enumerate(zip(self.first, self.last, strict=True))
        ]
        room = most // (1 + BEFORE + AFTER)
        total = sum(len(one) for one in each)
        if total > room:
            share = max(2, room // max(1, sum(bool(one) for one in each)))
            each = [one if len(one) <= share else one[: share - share // 3] + one[-(share // 3) :] for one in each]
        return sorted(chain.from_iterable(each))


@dataclass(frozen=True, slots=True)
class _Read:
    """A line with the offset of its end; `ended` unless it was cut there."""

    number: int
    text: bytes
    end: int
    ended: bool


@dataclass(slots=True)
class Extent:
    """How much there was, and how much of it was read. `dense` are the anchors that stand in so many lines that they were given up."""

    bytes: int = 0
    lines: int = 0
    read: int = 0
    dense: set[str] = field(default_factory=set)

    def add(self, other: Extent) -> None:
        self.bytes += other.bytes
        self.lines += other.lines
        self.read += other.read
        self.dense |= other.dense

    def __str__(self) -> str:
        text = (
            f"{self.bytes / 1e6:,.1f} MB of logs: {self.read:,} of {self.lines:,} lines were read: heads, tails, and what stands "
            "around the first and last of each known text"
        )
        return f"{text}; too frequent to follow: {', '.join(sorted(self.dense))}" if self.dense else text


def around(artifact: Artifact, anchors: tuple[str, ...], most: int, extent: Extent) -> Iterator[tuple[int, bytes]]:
    """Numbers and bytes of the lines that may matter, in their order, each once. Raises ReaderError."""
    with opened(artifact.path) as file:
        kept, newlines, size = _hits(file, anchors, extent.dense)
        hits = kept.chosen(most)
        told = 0
        done, number = 0, 1  # what was given out: up to this offset, where this line begins
        for offset, at, anchor in ((0, 1, None), *hits):
            after = HEAD if anchor is None else LONG_AFTER if anchors[anchor] in _LONG else AFTER
            for line in _window(file, offset, at, at + after, done, number):
                told += 1
                done, number = line.end, line.number + line.ended
                yield line.number, line.text
        for at, text in _tail(file, size, newlines, done, max(1, most // 4)):
            told += 1
            yield at, text
    extent.bytes += size
    extent.lines += max(newlines, told)
    extent.read += told


def _hits(file: BinaryIO, anchors: tuple[str, ...], given_up: set[str]) -> tuple[_Kept, int, int]:
    """The hits, the number of line ends and the size, by one pass over the file."""
    kept = _Kept(anchors)
    wanted = list(range(len(anchors)))
    automaton = _automaton(anchors)
    overlap = max(len(one.encode()) for one in anchors) - 1
    carry, base, newlines, seen = b"", 0, 0, 0  # `seen` bytes of the carry were searched already
    while True:
        read = file.read(CHUNK)
        data = carry + read
        end = data.rfind(_NEWLINE) + 1 if read else len(data)
        within = not end  # a line longer than the chunk
        end = end or len(data)
        at, number = 0, newlines + 1
        searched = data if end == len(data) else memoryview(data)[:end]
        for found, start, stop in automaton.find_matches_as_indexes(searched):
            if stop <= seen:
                continue
            number += data.count(_NEWLINE, at, start)
            at = start
            kept.add(wanted[found], base + start, number)
        keep = end - overlap if within and read and end > overlap else end
        newlines = number - 1 + data.count(_NEWLINE, at, keep)
        carry, base = data[keep:], base + keep
        seen = len(carry) if within else 0
        if not read:
            return kept, newlines, base
        dense = [one for one in wanted if kept.seen[one] > DENSE]
        if dense and len(wanted) > len(dense):
            wanted = [one for one in wanted if one not in dense]
            automaton = _automaton(tuple(anchors[one] for one in wanted))
            given_up.update(anchors[one] for one in dense)


def _window(file: BinaryIO, offset: int, at: int, last: int, done: int, number: int) -> Iterator[_Read]:
    """The lines before the hit at `offset` in line `at`, its own, and those behind it up to line `last`; none before `done`,
    where line `number` begins.
    """
    if offset >= done:
        begin = max(done, offset - _BLOCK)
        file.seek(begin)
        above = file.read(offset - begin)
        cut = len(above)
        for back in range(BEFORE + 1):
            found = above.rfind(_NEWLINE, 0, cut)
            if found < 0:
                start = begin if begin == done else begin + (cut + 1 if back else 0)
                done, number = start, at - above.count(_NEWLINE, start - begin)
                break
            cut = found
        else:
            done, number = begin + cut + 1, at - BEFORE
    file.seek(done)
    while number <= last:
        line = file.readline(_PIECE)
        if not line:
            return
        done += len(line)
        ended = line.endswith(_NEWLINE)
        yield _Read(number, line.rstrip(_NEWLINE), done, ended)
        if not ended:  # the rest of a line too long: only what stands around its hits
            return
        number += 1


def _tail(file: BinaryIO, size: int, newlines: int, done: int, most: int) -> Iterator[tuple[int, bytes]]:
    """The last lines of the file, none before `done`."""
    file.seek(max(done, size - TAIL))
    tail = file.read(TAIL)
    lines = tail.split(_NEWLINE)
    number = newlines - (len(lines) - 1) + 1
    if size - TAIL > done and len(lines) > 1:
        lines, number = lines[1:], number + 1
    for at, line in enumerate(lines[-most:], number + max(0, len(lines) - most)):
        if line:
            yield at, line[-_PIECE:]
