"""Text artifacts as lines: colours and progress bars undone, the tags and stamps of launchers read and taken off.

An artifact of up to WHOLE bytes becomes lines entirely, as long as all of them together stay within TOGETHER. Of a larger one only
what may matter does: its head, its tail, and what stands around each line that holds an anchor of a signature (`scan`). Line
numbers are exact in either case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dtprobe.diagnose.case import Artifact, Line
from dtprobe.diagnose.lines import scan, stamps
from dtprobe.diagnose.lines.envelope import Envelope, opened
from dtprobe.diagnose.lines.habits import learned
from dtprobe.diagnose.lines.wrapped import Unwrapper, error_file
from dtprobe.diagnose.signatures import anchors
from dtprobe.readers.artifact import Problem, Problems, ReaderError, one_line, read_bytes

WHOLE = 2 << 20
TOGETHER = 16 << 20
SAMPLE = 64 << 10
_SAMPLE_LINES = 400
LONGEST = 64 << 10
"""A line beyond so many bytes is cut: its head, its tail and what stands around its anchors are read."""
_SIDE = 4096
_MOST_PIECES = 32

ANCHORS = (
    "Traceback (most recent call last)",
    " nranks ",
    "world_size",
    "WORLD_SIZE",
    "global_ranks=",
    "local_rank: ",
    "host      :",
    "rank      :",
    "exitcode  :",
    "Starting with JobEnvironment",
)
"""What this room and `who` look for in a log too large to be read whole, beside the anchors of the signatures."""

_COLOURS = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_BAR = re.compile(r"\d{1,3}%\||\b(?:it/s|s/it)\]|[\u2580-\u259f\u28c0-\u28ff]{3}|━{3}")
_CONTINUES = re.compile(r"\s|frame #\d|#\d+ |Exception raised from |\s*$")
_INNER = re.compile(r"\[rank\d{1,6}\]:|\[[WEF](?:20\d\d)?\d{3,4} \d\d:\d\d:\d\d\.\d{6,9} [\w./-]+:\d+\]")


@dataclass(slots=True)
class _Before:
    """What a line without any tag of its own takes over when it goes on with the one before it."""

    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    t_ns: int | None = None
    zoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A text artifact and what its reading takes from all the others: with this, each can be read by itself, anywhere.

    `near_ns` is about when the job ran. Of one that is not read `whole` about `most` lines are.
    """

    artifact: Artifact
    near_ns: int | None
    whole: bool
    most: int


@dataclass(slots=True)
class Read:
    """What became of one text artifact."""

    lines: list[Line] = field(default_factory=list)
    problems: Problems = field(default_factory=list)
    extent: scan.Extent = field(default_factory=scan.Extent)


def planned(artifacts: Sequence[Artifact]) -> list[Reading]:
    """How all text artifacts are to be read, within bounds that hold for all of them together."""
    dated = sorted(one.dated_ns for one in artifacts if one.dated_ns is not None)
    near_ns = dated[len(dated) // 2] if dated else None
    left = TOGETHER
    most = max(scan.FEWEST, scan.MOST // max(sum(one.size > WHOLE for one in artifacts), 1))
    found = []
    for one in artifacts:
        whole = one.size <= min(WHOLE, left)
        left -= one.size if whole else 0
        found.append(Reading(artifact=one, near_ns=near_ns, whole=whole, most=most))
    return found


def read(reading: Reading) -> Read:
    """Read one text artifact."""
    found = Read()
    extent = None if reading.whole else found.extent
    found.lines = list(read_lines(reading.artifact, found.problems, reading.near_ns, extent=extent, most=reading.most))
    return found


def joined(readings: Sequence[Reading], found: Iterable[Read], problems: Problems) -> list[Line]:
    """The lines of all text artifacts, each read in its turn; what was left out is a problem."""
    lines: list[Line] = []
    extent = scan.Extent()
    for one in found:
        lines += one.lines
        problems += one.problems
        extent.add(one.extent)
    if extent.bytes:
        large = [one.artifact.name for one in readings if one.artifact.size > WHOLE]
        problems.append(Problem(large[0] if len(large) == 1 else "large logs", "cut", str(extent)))
    return lines


def read_lines(
    artifact: Artifact,
    problems: Problems | None = None,
    near_ns: int | None = None,
    *,
    extent: scan.Extent | None = None,
    most: int = scan.MOST,
) -> Iterator[Line]:
    """The lines of a text artifact: all of them, or with `extent`, to which it adds, those around anchors, about `most`.

    `near_ns` is about when the job ran, for stamps without a year. What cannot be read is a problem, never an exception.
    """
    told: Problems = []
    try:
        yield from _lines(artifact, _numbered(artifact, extent, most, told), near_ns)
    except ReaderError as error:
        told.append(Problem("", "unreadable", one_line(error.message.replace(str(artifact.path), artifact.name))))
    if problems is not None:
        problems.extend(replace(one, source=artifact.name) for one in told)


def _numbered(artifact: Artifact, extent: scan.Extent | None, most: int, problems: Problems) -> Iterator[tuple[int, bytes]]:
    """Line numbers, from 1, and the lines' bytes."""
    if extent is None:
        data = _plain(read_bytes(artifact.path, 2 * WHOLE, problems))
        return enumerate(data.split(b"\n"), 1)
    return scan.around(artifact, (*anchors(), *ANCHORS), most, extent)


def _plain(data: bytes) -> bytes:
    """Text of two bytes a character (a redirection of PowerShell) as UTF-8."""
    encoding = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}.get(data[:2])
    return data[2:].decode(encoding, "replace").encode() if encoding else data


def _lines(artifact: Artifact, numbered: Iterator[tuple[int, bytes]], near_ns: int | None) -> Iterator[Line]:
    sample: list[tuple[int, bytes]] = []
    for number, raw in numbered:
        sample.append((number, raw))
        if len(sample) >= _SAMPLE_LINES:
            break
    habits = learned([text for _, raw in sample for text in _parts(raw[:1024])])
    calendar = stamps.Calendar(artifact.dated_ns or near_ns, artifact.near_ns)
    before, wrapped = _Before(), Unwrapper()
    for number, raw in _chained(sample, numbered):
        for piece in _pieces(raw):
            for part in _parts(piece):
                stack, written_ns = error_file(part)
                for text in stack:
                    found = Envelope(text, t_ns=written_ns, bare=False)
                    yield _line(artifact, number, text, found, before, ends=True)
                for text, found in _segments(part, opened(part, habits, calendar), habits, calendar):
                    yield _line(artifact, number, text, found, before, ends=wrapped.unwrap(found))


def _chained(first: Sequence[tuple[int, bytes]], rest: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    yield from first
    yield from rest


def _pieces(raw: bytes) -> Iterator[bytes]:
    """The line, or of one beyond measure its head, its tail and what stands around its anchors."""
    if len(raw) <= LONGEST:
        yield raw
        return
    spans = scan.spans(raw, (*anchors(), *ANCHORS), _SIDE, _MOST_PIECES)
    for start, end in spans:
        yield raw[start:end]


def _parts(raw: bytes) -> Iterator[str]:
    """What one line showed one after the other: a bar that rewrote it shows its last state, and messages between stay."""
    text = raw.decode("utf-8", "replace").rstrip("\r")
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    if "\r" not in text:
        if text and not text.isspace():
            yield text
        return
    parts = [one for one in text.split("\r") if one.strip()]
    for at, one in enumerate(parts):
        if at == len(parts) - 1 or not _BAR.search(one):
            yield one


def _segments(raw: str, found: Envelope, habits: Any, calendar: stamps.Calendar) -> Iterator[tuple[str, Envelope]]:
    """The line as it stands with its envelope; where the text of another rank broke into it, each of the two."""
    inner = _INNER.search(found.text, 1)
    while inner is not None:
        head, tail = found.text[: inner.start()], found.text[inner.start() :]
        yield raw[: len(raw) - len(tail)], replace(found, text=head.rstrip())
        host = found.host
        raw, found = tail, opened(tail, habits, calendar)
        found.host = found.host or host
        inner = _INNER.search(found.text, 1)
    yield raw, found


def _line(artifact: Artifact, number: int, raw: str, found: Envelope, before: _Before, *, ends: bool) -> Line:
    own = found.rank is not None or found.local_rank is not None or found.pid is not None or found.labelled
    if own or not (ends or _CONTINUES.match(found.text)) or _BAR.search(found.text):
        before.rank, before.local_rank, before.pid = found.rank, found.local_rank, found.pid
        before.host, before.t_ns, before.zoned = found.host, found.t_ns, not found.bare
    t_ns = before.t_ns if found.t_ns is None else found.t_ns
    return Line(
        artifact=artifact,
        number=number,
        text=found.text,
        raw=raw,
        t_ns=None if t_ns is None else artifact.placed_ns(t_ns),
        rank=artifact.rank if before.rank is None else before.rank,
        local_rank=artifact.local_rank if before.local_rank is None else before.local_rank,
        host=before.host or artifact.host,
        pid=before.pid,
        zoned=before.zoned if found.t_ns is None else not found.bare,
    )
