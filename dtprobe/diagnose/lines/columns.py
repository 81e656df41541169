"""A column of labels before lines that nobody documents (`<3> `, `r3 | `, `[GPU3] `, `10:00:02 rank=3 `), learned from many lines.

What makes a number at the start of lines a label and not a count is how it goes along the lines: it takes few values, comes back to
each, and the same texts follow different ones.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Means = Literal["rank", "local", "node", "host"]

ENOUGH = 3
WORDED_SHARE, SHARE = 0.25, 0.6
"""Of the lines, so many must carry a label: with a word for a process in it, or without."""
MOST_VALUES = 4096
_LEVEL = r"(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL)"
# what loggers put before a message: a clock, a level, their own name
_HEAD = (
    r"(?:\[?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]?[ -]{1,3})?"
    rf"(?:(?:\[{_LEVEL}\] {{1,2}}|{_LEVEL}(?::| {{0,8}}[|-] | {{1,5}}))|(?!{_LEVEL})[A-Za-z_][\w.:<>]{{0,60}} {{0,4}}[|-] ){{0,3}}"
)
_OPEN = r"[\[(<{|#*]{0,2}"
_WORD = r"(?P<word>[A-Za-z][A-Za-z_-]{0,23}?)?"
_HOST = r"(?:(?P<host>[A-Za-z][\w.-]{0,60}?)[:/])?"
_CLOSE = r"(?:[\])>}|]{1,2}:?|:| ?\|{1,2}| -{1,2}|(?=[ \t]))(?P<gap>[ \t]|$|(?=\[))"
_LABEL = re.compile(rf"(?P<head>{_HEAD}){_OPEN}{_HOST}{_WORD}(?P<sign>[ =:#_.-]{{0,2}})(?P<label>\d{{1,6}}){_CLOSE}")
_PROCESS = re.compile(
    r"(?i)^(?:(?:global|world|dist|mpi|ddp|my|dp)[_-]?)?(?:rank|rk|r)$|^(?:\w+[_-])?(?:worker|proc|process|trainer|task|replica|peer)$"
)
_LOCAL = re.compile(r"(?i)^(?:local[_-]?(?:rank|r)?|lr|gpu|cuda|device|dev|card|npu|default|slot)$")
_NODE = re.compile(r"(?i)^(?:node|host|machine|nodeid|group|agent|instance|server|srv|n)$")
_COUNTS = re.compile(
    r"(?i)^(?:\w+[_-])?(?:step|epoch|ep|iter|iteration|it|batch|layer|loss|chunk|micro\w*|attempt|retry|retries|try|line|page|part|shard|"
    r"expert|block|stage|head|sample|file|bucket|fold|trial|episode|round|update|frame|train|eval|val|test|seq|token|version|v|job|level|id|no|t|"
    r"error|errno|code|status|port|phase|time|index|idx|i|k|sleep|total|size|item|row|col|bin|day|hour|thread|tid|pid|seed|model|stride)$"
)


@dataclass(frozen=True, slots=True)
class _Found:
    label: int
    host: str | None
    rest: str


def column(lines: Sequence[str]) -> tuple[re.Pattern[str], Means] | None:
    """The pattern of the label that these lines begin with, and what its number is; None where they have none.

    The pattern has the group `label`, `host` where one stands before it, and `own` where the label is a name with a number.
    """
    kinds: dict[tuple[str, ...], list[_Found]] = defaultdict(list)
    patterns: dict[tuple[str, ...], re.Pattern[str]] = {}
    for line in lines:
        for key, pattern, found in _read(line):
            kinds[key].append(found)
            patterns.setdefault(key, pattern)
    for key, labels in sorted(kinds.items(), key=lambda one: -len(one[1])):
        if (means := _means(key, labels, len(lines))) is not None:
            return patterns[key], means
    return None


def _read(line: str) -> Iterator[tuple[tuple[str, ...], re.Pattern[str], _Found]]:
    match = _LABEL.match(line)
    if match is None:
        return
    word, sign, host = match["word"] or "", match["sign"], match["host"]
    start = match.start("word") if word else match.start("sign")
    if host and not word and any(one.match(host) for one in (_PROCESS, _LOCAL, _NODE, _COUNTS)):
        word, sign, start, host = host, line[match.end("host") : match.start("label")], match.start("host"), None
    if word and sign == "-":
        return  # the name of a pod or a host
    end = match.end("label")
    left = match.start("host") if host else start
    opened, closed = line[match.end("head") : left], line[end : match.end()]
    key = (opened, "host" if host else "", word, sign, closed)
    inner = r"(?P<host>[A-Za-z][\w.-]{0,60}?)[:/]" if host else ""
    number = rf"{re.escape(word + sign)}(?P<label>\d{{1,6}})"
    number = rf"(?P<own>{number})" if word and not host and not sign else number
    pattern = re.compile(
        rf"(?P<head>{_HEAD}){re.escape(opened)}{inner}{number}{re.escape(closed.rstrip())}"
        + (r"(?:[ \t]|$)" if closed[-1:].isspace() or not closed else "")
    )
    yield key, pattern, _Found(int(match["label"]), host, line[match.end() :])


def _means(key: tuple[str, ...], found: Sequence[_Found], lines: int) -> Means | None:
    opened, host, word, sign, closed = key
    values = {one.label for one in found}
    if len(found) < ENOUGH or len(values) > MOST_VALUES:
        return None
    share = len(found) / lines
    if _PROCESS.match(word) and share >= WORDED_SHARE:
        return "rank"
    if _LOCAL.match(word) and share >= WORDED_SHARE:
        return "local" if len(found) >= 2 * len(values) else None  # each once is a list of devices
    if share < SHARE or _COUNTS.match(word) or not (word or opened or closed.strip()):
        return None
    name = bool(word) and not sign and not host
    if name and not opened and closed.strip() in ("", ":", "|", "||"):
        return None  # a host's or a container's name
    if host:
        return _beside_hosts(found)
    if not _recurs(found) or max(values) >= 4 * len(values) + 8:
        return None
    if _NODE.match(word) or (name and values != set(range(len(values)))):
        return "host" if name else "node"
    return "rank"


def _recurs(found: Sequence[_Found]) -> bool:
    """Few values that come back, and texts that follow several of them."""
    values = [one.label for one in found]
    if len(set(values)) < 2 or len(found) < 2 * len(set(values)) or not any(then < one for one, then in pairwise(values)):
        return False
    after: dict[str, set[int]] = defaultdict(set)
    for one in found:
        after[re.sub(r"\d+", "#", one.rest)[:60]].add(one.label)
    return any(len(ranks) > 1 for ranks in after.values())


def _beside_hosts(found: Sequence[_Found]) -> Means | None:
    """The number beside a host: the rank where no two hosts share one, else the rank within the host."""
    if not _recurs(found) and len(found) < 2 * ENOUGH:
        return None
    hosts: dict[int, set[str]] = defaultdict(set)
    for one in found:
        hosts[one.label].add(one.host or "")
    several = len({host for names in hosts.values() for host in names}) > 1
    return "rank" if several and all(len(names) == 1 for names in hosts.values()) else "local"
