"""Lines that belong to a quoted one: software tells of one fault in several lines, and not all of them stand in a finding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dtprobe.diagnose.case import Case, Line, Quote, quote

MOST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Companion:
    """Beside a line like `quoted` the nearest one like `wanted` belongs to it, up to so many lines `before` and `after`.

    `same`: both name the same process, by what stands in their group `who`, or are of the same rank.
    """

    quoted: re.Pattern[str]
    wanted: re.Pattern[str]
    before: int = 0
    after: int = 0


_NCCL_FAILED = r"ncclRemoteError|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|NCCL error"
_COMPANIONS = (
    _Companion(
        quoted=re.compile(r"exitcode\s*: -\d+ \(pid: (?P<who>\d+)\)"),
        wanted=re.compile(r"Signal \d+ \(\w+\) received by PID (?P<who>\d+)"),
        after=3,
    ),
    _Companion(quoted=re.compile(_NCCL_FAILED), wanted=re.compile(r"NCCL WARN "), before=60),
    _Companion(
        quoted=re.compile(r"should dump|Broken pipe|Connection reset|got 0 bytes"),
        wanted=re.compile(r"(?:recvValue|sendBytes|recvVector|recvBytes|sendValue)\w* failed on SocketImpl\("),
        before=200,
    ),
    _Companion(
        quoted=re.compile(r"no heartbeat|Heartbeat monitor timed out|Could not acquire GIL"),
        wanted=re.compile(r"watchdog got stuck for|terminating the process|Terminating the process"),
        after=200,
    ),
)
_LAST_ERROR = re.compile(r"^\s*(?:\[rank ?\d+\]:? ?)?Last error:\s*(?P<text>.*)$")
_ERROR_LINES = 6


def beside(case: Case, quotes: Sequence[Quote]) -> tuple[Quote, ...]:
    """The lines that belong to these, in their order."""
    asked = [(one, kind) for one in quotes if one.line is not None for kind in _COMPANIONS if kind.quoted.search(one.text)]
    failed = [one for one in quotes if one.line is not None and re.search(_NCCL_FAILED, one.text)]
    if not asked and not failed:
        return ()
    wanted = {one.file for one in quotes}
    files: dict[str, dict[int, Line]] = {name: {} for name in wanted}
    for line in case.lines:
        if line.artifact.name in wanted:
            files[line.artifact.name][line.number] = line
    found = [_last_error(files[one.file], one) for one in failed] + [
        _nearest(files[one.file], one, kind) for one, kind in asked
    ]
    shown = {(one.file, one.line) for one in quotes}
    kept = {(line.artifact.name, line.number): line for line in found if line is not None}
    return tuple(quote(line, "confirm") for place, line in kept.items() if place not in shown)[:MOST]


def _nearest(lines: dict[int, Line], one: Quote, kind: _Companion) -> Line | None:
    here = lines.get(one.line or 0)
    if here is None:
        return None
    numbers = [
        *range(here.number - 1, here.number - 1 - kind.before, -1),
        *range(here.number + 1, here.number + 1 + kind.after),
    ]
    who = kind.quoted.search(one.text)
    for number in numbers:
        line = lines.get(number)
        match = kind.wanted.search(line.raw) if line is not None else None
        if line is None or match is None:
            continue
        if "who" in match.groupdict():
            if who is not None and who["who"] == match["who"]:
                return line
        elif None in (line.rank, here.rank) or line.rank == here.rank:
            return line
    return None


def _last_error(lines: dict[int, Line], one: Quote) -> Line | None:
    """What NCCL says last, which stands on the line of `Last error:` or on the one below it."""
    for number in range((one.line or 0) + 1, (one.line or 0) + 1 + _ERROR_LINES):
        line = lines.get(number)
        found = _LAST_ERROR.match(line.raw) if line is not None else None
        if found is not None:
            return line if found["text"].strip() else lines.get(number + 1)
    return None
