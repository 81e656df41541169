"""A path that one rank made, and that ranks of another host did not see."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dtprobe.diagnose.case import Case, Finding, Line, quote
from dtprobe.diagnose.facts.raised import Raised, raised
from dtprobe.diagnose.facts.words import words
from dtprobe.diagnose.who import same_host

ANALYST = "visibility"
LOOKED, SHARED, APART = 0.88, 0.78, 0.7
_PATH = re.compile(r"(?<![\w.])/[\w./=+:@%-]*[\w=-]")
_MADE = re.compile(
    r"(?i)\b(?:mkdir\w*|makedirs?|mak(?:e|ing)|made|creat\w+|sav(?:e|ed|ing)|writ\w+|wrote|stored|flushed|uploaded|renamed|published)\b"
)
_UNSEEN = re.compile(r"(?i)does not exist|doesn't exist|no such file|not found|cannot find|can't find|missing|not a directory")
_LISTED = re.compile(r"^(?:ls: cannot access|stat: cannot stat(?:x)?) ['\"]?(?P<path>/\S+?)['\"]?: No such file")
_MOUNTED = re.compile(r"(?i)^/(?:nfs|lustre|gpfs|beegfs|efs|fsx|shared|cephfs|scratch|weka|vast|mnt)\b")


def analyse(case: Case) -> Iterator[Finding]:
    """A finding where a rank told that it made a path, and ranks elsewhere raised that it is not there."""
    missed = [one for one in raised(case) if one.rank is not None and not one.ignored and _UNSEEN.search(one.text)]
    paths = {path for one in missed for path in _PATH.findall(one.text)}
    if not paths:
        return
    for maker, lines in words(case).by_rank.items():
        for line in reversed(lines):
            made = (
                next((path for path in _PATH.findall(line.text) if _within(path, paths)), None)
                if _MADE.search(line.text)
                else None
            )
            if made is None:
                continue
            blind = [
                one for one in missed if one.rank != maker and any(_inside(path, made) for path in _PATH.findall(one.text))
            ]
            ranks = tuple(sorted({one.rank for one in blind if one.rank is not None}))
            if ranks and maker not in {one.rank for one in missed}:
                looked = [each for each in case.lines if (found := _LISTED.match(each.text)) and _inside(found["path"], made)]
                if (likelihood := _likelihood(case, maker, ranks, made, looked)) is not None:
                    yield _finding(maker, line, blind, ranks, looked, likelihood)
                    return


def _within(path: str, missed: set[str]) -> bool:
    return any(_inside(one, path) for one in missed)


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _likelihood(case: Case, maker: int, ranks: tuple[int, ...], path: str, looked: list[Line]) -> float | None:
    """How surely the hosts see it differently; None where maker and others are on one host."""
    seats = [case.who.of(rank) for rank in (maker, *ranks)]
    hosts = [seat.host for seat in seats if seat is not None and seat.host is not None]
    if len(hosts) == len(seats) and all(same_host(hosts[0], other) for other in hosts[1:]):
        return None
    apart = len(hosts) == len(seats)
    if looked:
        return LOOKED
    if _MOUNTED.match(path) or case.of("nfs-mount"):
        return SHARED
    return APART if apart or case.who.several else None


def _finding(
    maker: int, line: Line, blind: list[Raised], ranks: tuple[int, ...], looked: list[Line], likelihood: float
) -> Finding:
    return Finding(
        mode="nfs-stale-view",
        analyst=ANALYST,
        likelihood=likelihood,
        because=f"Rank {maker} told that it made a path, and rank {', '.join(map(str, ranks[:8]))} did not find it: its host's view of the file system is older.",
        first=ranks[0],
        suspects=ranks,
        host=blind[0].line.host,
        at_ns=blind[0].line.t_ns,
        evidence=(
            quote(blind[0].line, "cause"),
            quote(line, "cause"),
            *(quote(each, "confirm") for each in looked[:2]),
            *(quote(one.line, "confirm") for one in blind[1:3]),
        ),
        not_proven="" if looked else "that the path appears there later, as with cached attributes, and is not local to a host",
    )
