"""What became of the job: whether it came to its end in spite of whatever was said on the way, and who says so."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dtprobe.diagnose import seen
from dtprobe.diagnose.case import Case, Line
from dtprobe.diagnose.facts.ends import ends
from dtprobe.diagnose.facts.hang import world
from dtprobe.diagnose.facts.raised import Raised, raised
from dtprobe.diagnose.facts.timeouts import waits
from dtprobe.diagnose.facts.words import SPOKEN, Words, says, words

By = Literal["launcher", "ranks", "progress"]
LAST = 3
"""A rank's last word stands within so many of its last own lines."""
TAIL = 8
"""Progress to the end: so many of the last own lines of a file are looked at for it."""
RECENT = 2000
"""So many last lines of a file are compared with each other."""
STEPS = 3
"""Progress is told at least so often."""
WELL = frozenset({"COMPLETED", "Completed", "Succeeded"})
UNDER_WAY = frozenset({"Running", "Pending", "Terminating"})
FAILURES = (
    "elastic-root-cause",
    "elastic-forced",
    "elastic-agent-signal",
    "spawn-raised",
    "native-segfault",
    "fatal-python",
    "terminate-called",
    "ray-worker-died",
)
"""Lines that a job prints which ends badly, whatever was said before."""
_AT = re.compile(
    r"(?i)\b(?:global[_ ]?)?(?P<what>epoch|step|iter(?:ation)?|it|update|batch)s?\b[\s:=#'\"\[(]*(?P<at>\d+)(?:\s*(?:/|of)\s*(?P<of>\d+))?"
)

_LOGGED = re.compile(
    r"\b(?:ERROR|WARN(?:ING)?|CRITICAL)\b|(?i:\b(?:failed|could not|cannot|caught|ignor\w+|retry\w*|giving up)\b)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The job ended well. `by` is who says so: a launcher or scheduler, the ranks' own last words, or only that they went on to the
    end of their logs; `lines` are these words."""

    by: By
    lines: tuple[Line, ...]

    @property
    def told(self) -> bool:
        """Whether anybody says that it ended, so that trouble on the way was got over."""
        return self.by != "progress"


@lru_cache(maxsize=2)
def outcome(case: Case) -> Outcome | None:
    """How the job ended well; None where it did not, or nothing tells."""
    finished = case.of("job-ended-well")
    if _failed(case):
        return None
    rows = [*case.of("scheduler-row"), *case.of("pod-row")]
    if any(event.fields["state"] in UNDER_WAY for event in rows):
        return None
    good = [event.line for event in (*finished, *rows)]
    if good:
        return Outcome(by="launcher", lines=tuple(good))
    told = words(case)
    if last := _last_words(case, told):
        return Outcome(by="ranks", lines=last)
    if last := _progress(case, told):
        return Outcome(by="progress", lines=last)
    return None


def _failed(case: Case) -> bool:
    """Whether anything tells that it ended badly, and not before a restart that its launcher saw to the end."""

    def before(line: Line) -> bool:
        return line.number < _restarted(case).get(line.artifact.name, 0)

    joined, observed = waits(case), seen.of(case)
    if any(one.error or one.ended_ns is None for one in observed.tries):
        return True
    if any(not before(event.line) for event in joined.gloo) or any(not before(one.line) for one in joined.timeouts):
        return True
    if any(one.code != 0 and not before(one.line) for one in ends(case)):
        return True
    if any(not before(event.line) for event in case.of(*FAILURES)):
        return True
    rows = [*case.of("scheduler-row"), *case.of("pod-row")]
    if any(event.fields["state"] not in WELL | UNDER_WAY or event.fields.get("code", "0") != "0" for event in rows):
        return True
    told, logged = words(case), handled(case)
    return any(not (one.ignored or before(one.line) or _went_on(one, told, 1 if one in logged else 2)) for one in raised(case))


@lru_cache(maxsize=2)
def _restarted(case: Case) -> Mapping[str, int]:
    """Where the last restart stands in each file that tells of a good end below it."""
    ends_of = {event.line.artifact.name: event.line.number for event in case.of("job-ended-well")}
    again: dict[str, int] = {}
    for line in case.lines if ends_of else ():
        if line.number < ends_of.get(line.artifact.name, 0) and says("says-restart", line):
            again[line.artifact.name] = line.number
    return again


@lru_cache(maxsize=2)
def handled(case: Case) -> frozenset[Raised]:
    """The exceptions that a logger's own complaint stands before: whoever logs one has caught it."""
    wanted = {(one.line.artifact.name, one.first_line - 1): one for one in raised(case)}
    found = ((wanted.get((line.artifact.name, line.number)), line) for line in case.lines) if wanted else ()
    return frozenset(one for one, line in found if one is not None and _LOGGED.search(line.text))


def _went_on(one: Raised, told: Words, steps: int) -> bool:
    """The rank that raised it spoke its last word or trained on below the traceback, in the same file."""
    own = told.by_rank.get(one.rank, ()) if one.rank is not None else ()
    lines = own or (told.unsaid if one.rank is None and not told.by_rank else [])
    if one.rank is None and told.by_rank:
        lines = [line for spoken in told.by_rank.values() for line in spoken]
    after = [line for line in lines if line.artifact.name == one.line.artifact.name and line.number > one.line.number]
    if any(says("says-clean-end", line) for line in after):
        return True
    return len({place for line in after if (place := at(line)) is not None}) >= steps


def at(line: Line) -> tuple[tuple[str, int], ...] | None:
    """Where in its work a line says that it is: epoch and step, as far as it tells them."""
    found = tuple((one["what"].lower(), int(one["at"])) for one in _AT.finditer(line.text[:400]))
    return found or None


def _last_words(case: Case, told: Words) -> tuple[Line, ...]:
    """The last words of every rank that speaks; of one rank, where the others came as far as it did."""
    if not told.by_rank:
        said = [line for line in told.unsaid[-LAST:] if says("says-clean-end", line)]
        return tuple(said[-1:])
    clean = {rank: line for rank, lines in told.by_rank.items() for line in lines[-LAST:] if says("says-clean-end", line)}
    quiet = set(told.by_rank) - set(clean)
    ended = list(clean.values()) or [line for line in told.unsaid[-LAST:] if says("says-clean-end", line)]
    if not ended:
        return ()
    if quiet and (len(_furthest(told.by_rank)) != 1 or set(told.by_rank) != set(world(case))):
        return ()
    return tuple(ended[:4])


def _furthest(by_rank: Mapping[int, Sequence[Line]]) -> set[tuple[tuple[str, int], ...] | None]:
    """Where the ranks are in their last lines that tell it."""
    return {
        next((place for line in reversed(lines[-60:]) if (place := at(line)) is not None), None) for lines in by_rank.values()
    }


def _progress(case: Case, told: Words) -> tuple[Line, ...]:
    """The last lines of logs that go on to their end with all ranks together; none where anybody looked at a job that stood still."""
    looked_at = any(one.kind not in SPOKEN | {"empty", "kernel-log", "nvidia-smi"} for one in case.artifacts)
    if looked_at or case.recording is not None or not any(told.steps.values()) or told.differences():
        return ()
    spoken = [line for lines in told.by_rank.values() for line in lines] + list(told.unsaid)
    by_file: dict[str, list[Line]] = {}
    for line in sorted(spoken, key=lambda one: one.number):
        by_file.setdefault(line.artifact.name, []).append(line)
    by_file = {name: lines[-RECENT:] for name, lines in by_file.items()}
    if told.by_rank and (
        len(_furthest(told.by_rank)) != 1 or (len(told.by_rank) > 1 and set(told.by_rank) != set(world(case)))
    ):
        return ()
    last: list[Line] = []
    places: set[object] = set()
    seen_at: set[object] = set()
    for lines in by_file.values():
        where = [(line, place) for line in lines if (place := at(line)) is not None]
        if not where:
            continue
        line, place = where[-1]
        if lines.index(line) < len(lines) - TAIL or not _together([one for _, one in where]) or not _to_the_end(line):
            return ()
        last.append(line)
        places.add(place)
        seen_at |= {one for _, one in where}
    if len(places) != 1 or len(seen_at) < STEPS:
        return ()
    return tuple(last[:4])


def _together(places: Sequence[object]) -> bool:
    """Whether the last place is told as often as most are: no rank stayed behind."""
    counts = Counter(places)
    usual = Counter(counts.values()).most_common(1)[0][0]
    return counts[places[-1]] >= usual


def _to_the_end(line: Line) -> bool:
    """Whether the last of so many is told, where the line tells how many there are."""
    return all(int(one["at"]) >= int(one["of"]) - 1 for one in _ends(line))


def _ends(line: Line) -> Iterator[re.Match[str]]:
    return (one for one in _AT.finditer(line.text[:400]) if one["of"])
