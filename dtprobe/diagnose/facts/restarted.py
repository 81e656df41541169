"""Which attempt of a restarted job each line is of: by torchrun's folders, by its words in between, by what a folder's file repeats."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from dtprobe.diagnose.case import Case, Finding, Line
from dtprobe.diagnose.diagnosis import HEALTHY
from dtprobe.diagnose.weigh import level

_FOLDER = re.compile(r"(?:^|/)(?:attempt|restart|retry)[_-]?(?P<attempt>\d{1,4})/")
_AGAIN = re.compile(
    r"will restart worker group|[Rr]estarting worker(?:s| group)|restarting (?:all )?(?:workers|actors|the job)|"
    r"TORCHELASTIC_RESTART_COUNT=[1-9]|restart_count\s*=\s*[1-9]|Restarting job|Requeu(?:ed|ing) (?:job|and restart)"
)
_ANCHORS = ("estart", "RESTART", "equeu")
NEAR = 200
"""Markers that stand nearer to each other than so many lines, with no traceback between, tell of the same restart."""
SHORTEST = 12
CAUSE = 0.5
"""A finding this likely is a cause of its attempt's end."""
LATER = 0.4
"""What is left of what only a later attempt shows."""


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """`marks` are the line numbers at which a file's next attempt begins, `folders` the attempts by file, `repeated` those by text."""

    marks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    folders: Mapping[str, int] = field(default_factory=dict)
    repeated: Mapping[str, int] = field(default_factory=dict)
    first: int = 0

    @property
    def several(self) -> bool:
        """Whether the job was started again at all."""
        return any(self.marks.values()) or len(set(self.folders.values())) > 1

    def at(self, file: str, number: int | None, text: str = "") -> int:
        """The attempt that a line is of."""
        if file in self.folders:
            return self.folders[file]
        if number is not None and self.marks.get(file):
            return bisect_right(self.marks[file], number)
        return self.repeated.get(text.strip(), self.first)

    def of(self, line: Line) -> int:
        """The same of a line."""
        return self.at(line.artifact.name, line.number, line.text)

    def of_finding(self, one: Finding) -> int:
        """The first attempt that decisive lines of a finding are of."""
        found = [self.at(item.file, item.line, _bare(item.text)) for item in one.evidence if item.role == "cause"]
        return min(found, default=self.first)


@lru_cache(maxsize=2)
def attempts(case: Case) -> Attempts:
    """What tells of attempts in this case."""
    folders = {one.name: int(match["attempt"]) for one in case.artifacts if (match := _FOLDER.search(one.name))}
    first = min(folders.values(), default=0)
    texts: dict[str, set[int]] = defaultdict(set)
    marks: dict[str, list[int]] = defaultdict(list)
    failed: dict[str, int] = {}
    for line in case.lines:
        name = line.artifact.name
        if name in folders:
            if len(line.text) >= SHORTEST:
                texts[line.text.strip()].add(folders[name])
        elif any(one in line.text for one in _ANCHORS) and _AGAIN.search(line.text):
            known = marks[name]
            if not known or line.number - known[-1] > NEAR or failed.get(name, 0) > known[-1]:
                known.append(line.number)
        elif "Traceback (most recent" in line.text or "failed (exitcode" in line.text:
            failed[name] = line.number
    repeated = (
        {text: min(found) for text, found in texts.items() if min(found) > first} if len(set(folders.values())) > 1 else {}
    )
    return Attempts(marks=dict(marks), folders=folders, repeated=repeated, first=first)


def of_first(case: Case, findings: Sequence[Finding]) -> list[Finding]:
    """The findings, less likely where a later attempt shows them and an earlier one failed by itself: it is the first cause that counts."""
    known = attempts(case)
    if not known.several:
        return list(findings)
    effects = level("rank-killed")
    causes = [
        known.of_finding(one)
        for one in findings
        if one.likelihood >= CAUSE and level(one.mode) < effects and one.mode != HEALTHY
    ]
    earliest = min(causes, default=0)
    return [
        replace(one, likelihood=one.likelihood * LATER) if one.mode != HEALTHY and known.of_finding(one) > earliest else one
        for one in findings
    ]


def _bare(text: str) -> str:
    return re.sub(r"^(?:\[[a-z]+\d+\]: ?)+", "", text)
