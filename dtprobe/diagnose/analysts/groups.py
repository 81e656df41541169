"""Whether the ranks agree about who belongs to a process group."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from dtprobe.diagnose.case import Case, Finding, Line, quote
from dtprobe.diagnose.facts.timeouts import waits
from dtprobe.diagnose.facts.words import shape, words

_INIT = re.compile(
    r"(?P<host>[\w.-]+):(?P<pid>\d+):\d+ \[\d+\] NCCL INFO .*?\bcomm 0x\w+ rank (?P<rank>\d+) n[rR]anks (?P<size>\d+) .*?commId 0x(?P<id>\w+) - Init START"
)
_LIST = re.compile(r"[\[({] ?\d+(?:, ?\d+)+ ?[\])}]")


def analyse(case: Case) -> Iterator[Finding]:
    """A finding where more processes came to one communicator than it has places, or ranks print unlike member lists and hang."""
    claims: dict[tuple[str, int], dict[tuple[str, str], tuple[int, Line]]] = defaultdict(dict)
    for line in case.lines:
        if "Init START" in line.text and (found := _INIT.search(line.text)):
            claims[found["id"], int(found["size"])][found["host"], found["pid"]] = (int(found["rank"]), line)
    lists = _lists(case)
    crowded = [claim for (_id, size), claim in claims.items() if len(claim) > size]
    if crowded:
        claim = crowded[0]
        seats = sorted({rank for rank, _line in claim.values()})
        yield Finding(
            mode="new-group-misuse",
            analyst="groups",
            likelihood=0.88,
            because=f"{len(claim)} processes joined one communicator of {len(seats)} places: groups were made under the same name.",
            evidence=(
                *(quote(line, "cause") for line in lists[:3]),
                *(quote(line, "cause") for _rank, line in list(claim.values())[:3]),
            ),
            not_proven="which call made the group",
        )
    elif len(lists) > 1 and waits(case).timeouts:
        yield Finding(
            mode="new-group-misuse",
            analyst="groups",
            likelihood=0.6,
            because="Ranks print unlike member lists for the same group and then hang.",
            evidence=tuple(quote(line, "cause") for line in lists[:3]),
            not_proven="that the lists are arguments of new_group",
        )


def _lists(case: Case) -> list[Line]:
    """Lines that several ranks print alike but for a list of numbers: one of each list."""
    said: dict[str, dict[str, Line]] = defaultdict(dict)
    for lines in words(case).by_rank.values():
        for line in lines:
            if found := _LIST.search(line.text):
                said[shape(_LIST.sub("[]", line.text))].setdefault(found[0], line)
    kinds = [unlike for unlike in said.values() if len(unlike) > 1]
    return list(kinds[0].values()) if kinds else []
