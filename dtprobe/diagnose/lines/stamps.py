"""Time stamps at the start of log lines: of Python's logging, glog, loguru, syslog, journald, dmesg, containers, MPI."""

from __future__ import annotations

import re
from calendar import month_abbr
from dataclasses import dataclass
from datetime import date
from functools import lru_cache

DAY_NS = 86_400_000_000_000
_EPOCH = date(1970, 1, 1).toordinal()
_MONTHS = {name.lower(): at for at, name in enumerate(month_abbr) if name}
_ZONES = {
    "Z": 0,
    "UTC": 0,
    "GMT": 0,
    "EST": -300,
    "EDT": -240,
    "CST": -360,
    "CDT": -300,
    "PST": -480,
    "PDT": -420,
    "CET": 60,
    "CEST": 120,
}

_CLOCK = r"(?P<h>\d\d):(?P<mi>\d\d)(?::(?P<s>\d\d)(?:[.,](?P<f>\d{1,9}))?)?"
_ZONE = r"(?: ?(?P<z>Z|UTC|GMT|[+-]\d\d:?\d\d)(?![\w:]))?"
_ISO = r"(?P<y>\d{4})[-/](?P<mo>\d\d)[-/](?P<d>\d\d)(?:T| {1,2}|_|-)" + _CLOCK + _ZONE
_US = r"(?P<mo>\d\d)/(?P<d>\d\d)/(?P<y>\d{4}|\d\d)(?:-| {1,2}|, )" + _CLOCK + r"(?: (?P<ap>[AP]M)\b)?" + _ZONE
_C = (
    r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? (?P<mon>[A-Z][a-z]{2}) {1,2}(?P<d>\d{1,2}) "
    + _CLOCK
    + r"(?: (?P<z>[A-Z]{3,4}))? (?P<y>\d{4})"
)
_SYSLOG = r"(?P<mon>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}(?P<d>\d{1,2}) " + _CLOCK
_GLOG = r"[IWEFDC](?P<y>20\d\d)?(?P<mo>\d{1,2}?)(?P<d>\d\d) (?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)\.(?P<f>\d{3,9})"
_LEVEL = r"(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)"
_SHORT = r"(?P<mo>\d\d)-(?P<d>\d\d) " + _CLOCK
_SECONDS = r"(?P<epoch>1[0-9]{9}(?:\.\d{3,9}))(?=\s)"
_UPTIME = r"\[ *(?P<up>\d{1,9}\.\d{3,9})\]"
_SINCE = r"\[ *\+(?P<since>\d{1,9}\.\d{3,9})\]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """A moment read from a line. `end` is where the line goes on behind it, 0 where the stamp stands in the text and belongs to it.

    `t_ns` takes a stamp without a zone as UTC. `year` is null where the stamp names none: `t_ns` is then within the year 1972 (a
    leap year). `since_ns` is the time since the line before it that has an absolute stamp (dmesg's deltas). `bare`: it shows no zone.
    """

    t_ns: int = 0
    year: int | None = None
    since_ns: int | None = None
    end: int = 0
    bare: bool = True


def _leading(*bodies: str) -> tuple[re.Pattern[str], ...]:
    # closed by its bracket, with what loggers put beside the time in it ("TP8", a thread), or by a separator of loggers
    return tuple(
        re.compile(r" ?[\[(<]?" + one + r"(?:(?: [\w:.=-]{1,24}){1,3}(?=[\])]))?[\])>]?(?= |\t|$|\[|:|\|)[ \t]?(?:[|:-] )?")
        for one in bodies
    )


_AT_START = {
    "digit": _leading(_ISO, _US, _SECONDS),
    "month": _leading(_C, _SYSLOG),
    "bracket": (*(re.compile(r"(?:<\d{1,3}>)?" + one + " ?") for one in (_UPTIME, _SINCE)), *_leading(_ISO, _US, _C, _SYSLOG)),
}
_GLOG_AT = re.compile(r"\[?" + _GLOG)
_LEVEL_AT = re.compile(_LEVEL + r"[: ] ?\[?" + _SHORT)
_WITHIN = re.compile("|".join(re.sub(r"\?P<(\w+)>", rf"?P<\1_{at}>", one) for at, one in enumerate((_ISO, _US, _C))))
_ANY_CLOCK = re.compile(r"\d\d:\d\d")
WITHIN = 200
"""A full date that stands this far into a line, not at its start, is still taken for the line's time."""


def at_start(text: str) -> Stamp | None:
    """The stamp that begins the text, which its line's text goes on behind."""
    first = text[:1]
    if first == " ":
        first = text[1:2]
    patterns = _AT_START["digit"] if first.isdigit() else _AT_START["bracket"] if first in ("[", "(", "<") else None
    if patterns is None and first in ("M", "T", "W", "F", "S", "J", "A", "O", "N", "D"):
        patterns = _AT_START["month"]
    for pattern in patterns or ():
        if match := pattern.match(text):
            return _stamp(match.groupdict(), match.end())
    return None


def in_text(text: str) -> Stamp | None:
    """The stamp of a program that stands in its text: glog's header, a level before a short date, a full date further on."""
    if match := _GLOG_AT.match(text):
        return _stamp(match.groupdict(), 0)
    if match := _LEVEL_AT.match(text):
        return _stamp(match.groupdict(), 0)
    if _ANY_CLOCK.search(text, 0, WITHIN) and (match := _WITHIN.search(text, 0, WITHIN)):
        return _stamp({name.rsplit("_", 1)[0]: value for name, value in match.groupdict().items() if value is not None}, 0)
    return None


def _stamp(part: dict[str, str | None], end: int) -> Stamp | None:
    if since := part.get("since"):
        return Stamp(since_ns=round(float(since) * 1e9), end=end)
    if part.get("up"):
        return Stamp(end=end, since_ns=None, year=0)
    if seconds := part.get("epoch"):
        whole, _, fraction = seconds.partition(".")
        return Stamp(t_ns=int(whole) * 10**9 + int(fraction.ljust(9, "0")), year=1970, end=end, bare=False)
    year = part.get("y")
    month = _MONTHS.get((part.get("mon") or "").lower()) or int(part.get("mo") or 0)
    midnight = _midnight(_year(year), month, int(part["d"] or 0))
    if midnight is None:
        return None
    hour = int(part["h"] or 0)
    if half := part.get("ap"):
        hour = hour % 12 + 12 * (half == "PM")
    minute, second = int(part["mi"] or 0), int(part.get("s") or 0)
    if hour > 23 or minute > 59 or second > 60:
        return None
    zone = part.get("z")
    t_ns = midnight + ((hour * 60 + minute - _minutes(zone)) * 60 + second) * 10**9 + int((part.get("f") or "").ljust(9, "0"))
    return Stamp(t_ns=t_ns, year=_year(year) if year else None, end=end, bare=zone is None)


def _year(text: str | None) -> int:
    return 1972 if text is None else int(text) + (2000 if len(text) == 2 else 0)


def _minutes(zone: str | None) -> int:
    if zone is None:
        return 0
    if zone[0] in "+-":
        digits = zone[1:].replace(":", "")
        return (int(digits[:2]) * 60 + int(digits[2:])) * (-1 if zone[0] == "-" else 1)
    return _ZONES.get(zone, 0)


@lru_cache(maxsize=4096)
def _midnight(year: int, month: int, day: int) -> int | None:
    try:
        return (date(year, month, day).toordinal() - _EPOCH) * DAY_NS
    except ValueError:
        return None


def nearest_year(t_ns: int, near_ns: int, written_ns: int | None = None) -> int:
    """A moment of the year 1972 moved into the year that brings it nearest to another moment.

    Of years in which it would be more than a day after `written_ns`, when its file was last written, none counts.
    """
    year = date.fromordinal(_EPOCH + near_ns // DAY_NS).year
    day = date.fromordinal(_EPOCH + t_ns // DAY_NS)
    found = [_midnight(one, day.month, day.day) for one in (year - 1, year, year + 1)]
    moments = [one + t_ns % DAY_NS for one in found if one is not None]
    past = [one for one in moments if written_ns is None or one <= written_ns + DAY_NS]
    return min(past or moments, key=lambda one: abs(one - near_ns))


class Calendar:
    """Places the stamps of one artifact, in its lines' order: the year from the stamps around, a delta from the line before."""

    def __init__(self, near_ns: int | None, written_ns: int | None = None) -> None:
        self._near = near_ns if near_ns is not None else written_ns
        self._written = written_ns
        self._last: int | None = None

    def place(self, stamp: Stamp) -> int | None:
        """UTC nanoseconds of a stamp; null where nothing says when that was (seconds since a boot)."""
        if stamp.since_ns is not None:
            self._last = None if self._last is None else self._last + stamp.since_ns
            return self._last
        if stamp.year == 0:
            return None
        t_ns = stamp.t_ns
        if stamp.year is None:
            if self._near is None:
                return None
            t_ns = nearest_year(t_ns, self._near, self._written)
        self._near = self._last = t_ns
        return t_ns


_DATES = re.compile(
    rb"(20\d\d)[-/](\d\d)[-/](\d\d)[T _-]|(?<!\d)(\d\d)/(\d\d)/(20\d\d)[ -]|([A-Z][a-z]{2}) {1,2}(\d{1,2}) \d\d:\d\d:\d\d (?:[A-Z]{3,4} )?(20\d\d)"
)


def first_date_ns(data: bytes) -> int | None:
    """The first full date anywhere in the bytes, as the UTC nanoseconds of its midnight."""
    for match in _DATES.finditer(data):
        if match[1]:
            found = _midnight(int(match[1]), int(match[2]), int(match[3]))
        elif match[6]:
            found = _midnight(int(match[6]), int(match[4]), int(match[5]))
        else:
            found = _midnight(int(match[9]), _MONTHS.get(match[7].decode().lower(), 0), int(match[8]))
        if found is not None:
            return found
    return None
