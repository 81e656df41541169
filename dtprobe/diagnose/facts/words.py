"""What each rank's own program said before things went wrong, and what one rank says that its peers do not."""

from __future__ import annotations

import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from itertools import pairwise

from dtprobe.diagnose.case import Case, Line
from dtprobe.diagnose.facts.raised import raised
from dtprobe.diagnose.facts.timeouts import waits

LAST = 60
"""So many of the last own lines of a rank are compared with those of its peers."""
SPOKEN = frozenset({"text"})
"""Kinds of artifacts in which a program speaks; stacks, samples and answers of tools are words about it."""
TRAINED = 3
STEM = 3
NEAR = 8
"""So many of them tell what it was doing in the end."""
_FOREIGN = re.compile(
    r"^\[?[EWIF]\d{3,4} [\d:.]+ |^\[[EWIF] ?\d* ?[\d:.]* ?\w+\.(?:cpp|hpp|cc|cu):\d+\]|NCCL (?:INFO|WARN)|^frame #|^\s*#\d+ |"
    r"^\s*File \"|^Traceback |Exception raised from|terminate called|^\s*what\(\):|distributed[./]elastic|^={5,}|^-{5,}|^\*{5,}|"
    r"Sending process|warnings\.warn|(?:User|Future|Deprecation|Runtime)Warning|OMP_NUM_THREADS|^\s*(?:time|host|rank|exitcode|error_file|"
    r"traceback)\s+: |^(?:Failures|Root Cause)|^\[\d+\]:$|FAILED$|^Killing subprocess|^srun: |^slurmstepd|^\s*$|ProcessGroup\w+\.cpp|"
    r"^CUDA kernel errors|^Compile with|^For debugging consider|^Last error:|^nccl\w+Error: |NVRM:|\[c10d\]"
)
_RANK_WORD = re.compile(
    r"(?i)(?:(?<!\w)(?<!node-)(?<!local-)(?<!machine-)(?<!group-)(?<!local )(?<!node )(?<!group )(?:global[_ ]?)?rank[ _=:#]*|\[r|\bworker[ _=:#]*)(?P<rank>\d{1,5})\b"
)
_FIRST_NUMBER = re.compile(r"^\[?(?P<rank>\d{1,4})\]?(?::|\s)\s*(?=\D)")
_TWO_WORDS = re.compile(r"^\s*[A-Za-z]+ (?P<rank>\d{1,4})\s*$")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_STAMP = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?|\b\d\d:\d\d:\d\d(?:[.,]\d+)?\b")
_STEP = re.compile(r"(?i)\b(?:global[_ ]?)?(?:step|iter(?:ation)?|it|update)s?\b[\s:=#'\"\[(]*(?P<step>\d+)")
_COUNTED = re.compile(r"(?i)\b(?:epoch|batch|round)s?\b[\s:=#'\"\[(]*(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A line that a rank's peers print too, with another number where they agree."""

    rank: int
    line: Line
    mine: float
    theirs: float
    noun: str
    other: Line


@dataclass(frozen=True, kw_only=True)
class Words:
    """Own lines per rank up to the trouble; `unsaid` are lines that no rank could be found for."""

    by_rank: Mapping[int, Sequence[Line]] = field(default_factory=dict)
    unsaid: Sequence[Line] = ()
    processes: Mapping[tuple[str | None, int], int] = field(default_factory=dict)
    steps: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)

    def trained_after(self, file: str, line: int | None) -> bool:
        """Whether this file tells of several steps below that line: what stood in the way at the start was overcome."""
        below = [step for number, step in self.steps.get(file, ()) if line is not None and number > line]
        return len(below) >= TRAINED and len(set(below)) > 1

    def went_on(self, file: str, line: int) -> bool:
        """Whether this file tells of any step below that line."""
        return any(number > line for number, _ in self.steps.get(file, ()))

    def last(self, rank: int) -> Line | None:
        """The last own line of this rank."""
        own = self.by_rank.get(rank, ())
        return own[-1] if own else None

    def step(self, rank: int) -> int | None:
        """The last step number that this rank printed."""
        for line in reversed(self.by_rank.get(rank, ())[-LAST:]):
            if found := _STEP.search(line.text):
                return int(found["step"])
        return None

    def only(self, rank: int) -> list[Line]:
        """Of its last lines those whose like no other rank printed; none where no other rank printed anything."""
        others = {shape(line.text) for other, lines in self.by_rank.items() if other != rank for line in lines[-LAST:]}
        if not others:
            return []
        return [line for line in self.by_rank.get(rank, ())[-NEAR:] if shape(line.text) not in others]

    def differences(self) -> list[Difference]:
        """Lines that several ranks print alike but for a number in which one rank differs, the latest first."""
        said: dict[str, dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
        for rank, lines in self.by_rank.items():
            for line in lines[-LAST:]:
                said[stem(line.text)][rank].append(line)
        found = [one for ranks in said.values() if len(ranks) > 1 for one in _differing(ranks)]
        return sorted(found, key=lambda one: -one.line.number)


@cache
def vocabulary() -> dict[str, re.Pattern[str]]:
    """General words by what they tell, from `knowledge/words.toml`."""
    text = (files("dtprobe.diagnose") / "knowledge" / "words.toml").read_text(encoding="utf-8")
    return {entry["id"]: re.compile(entry["pattern"]) for entry in tomllib.loads(text)["word"]}


def says(kind: str, line: Line) -> bool:
    """Whether this line says such a thing."""
    return vocabulary()[kind].search(line.text) is not None


def shape(text: str) -> str:
    """The line without what changes from rank to rank and step to step: numbers, addresses, times."""
    bare = _NUMBER.sub("#", _HEX.sub("#", _STAMP.sub("#", text)))
    return re.sub(r"[\s\u2580-\u259f|]+", " ", bare).strip()


def unranked(text: str) -> str:
    """The line without the rank that it names and without times: equal where two ranks say the same."""
    return " ".join(_STAMP.sub("", _RANK_WORD.sub("", text)).split())


def stem(text: str) -> str:
    """How the line begins, numbers left out: up to its third word."""
    kept: list[str] = []
    for word in shape(_RANK_WORD.sub("", text)).split():
        if word.strip("#.,:;=()[]%+-"):
            kept.append(word.strip("#"))
        if len(kept) == STEM:
            break
    return " ".join(kept)


def aligned(lines: Mapping[int, Line]) -> dict[int, list[float]]:
    """The numbers of lines as far as the lines are alike, without times, addresses and the rank itself."""
    split = {rank: _tokens(line.text, rank) for rank, line in lines.items()}
    rows: dict[int, list[float]] = {rank: [] for rank in split}
    for column in zip(*split.values(), strict=False):
        if all(isinstance(one, float) for one in column):
            for rank, one in zip(split, column, strict=True):
                rows[rank].append(float(one))
        elif len(set(column)) > 1:
            break
    return rows


def _tokens(text: str, rank: int) -> list[float | str]:
    bare = _HEX.sub("", _STAMP.sub("", _RANK_WORD.sub("", text)))
    found = re.match(r"^\[?(\d+)\]?[ :]", bare)
    if found and int(found[1]) == rank:
        bare = bare[found.end() :]
    return [float(one) if _NUMBER.fullmatch(one) else one for one in re.findall(rf"{_NUMBER.pattern}|[A-Za-z_]+", bare)]


@lru_cache(maxsize=2)
def words(case: Case) -> Words:
    """Own lines of every rank, in the order read, up to the first time-out of its file."""
    known = {(event.line.artifact.name, event.line.number) for event in case.events}
    inside = {(one.line.artifact.name, one.rank): (one.first_line, one.line.number) for one in raised(case)}
    stops = _stops(case)
    own = [
        line
        for line in case.lines
        if line.artifact.kind in SPOKEN
        and (line.artifact.name, line.number) not in known
        and line.number < stops.get((line.artifact.name, line.rank), line.number + 1)
        and not _FOREIGN.search(line.text)
        and not _within(line, inside)
    ]
    steps: dict[str, list[tuple[int, int]]] = defaultdict(list)
    by_rank: dict[int, list[Line]] = defaultdict(list)
    unsaid: list[Line] = []
    leading = _leading(own)
    processes = _processes(own)
    for line in own:
        if found := _STEP.search(line.text):
            steps[line.artifact.name].append((line.number, int(found["step"])))
        elif counted := _COUNTED.findall(line.text):
            steps[line.artifact.name].append((line.number, sum(map(int, counted))))
        rank = processes.get((line.host, line.pid)) if line.pid is not None else None
        rank = _speaker(line, leading) if rank is None else rank
        if rank is None:
            unsaid.append(line)
        else:
            by_rank[rank].append(line)
    return Words(by_rank=dict(by_rank), unsaid=tuple(unsaid), processes=processes, steps=dict(steps))


def _stops(case: Case) -> dict[tuple[str, int | None], int]:
    """Where the trouble begins in each file: for a rank with its own time-out, for lines of nobody with the first one."""
    stops: dict[tuple[str, int | None], int] = {}
    for one in waits(case).timeouts:
        for rank in (one.rank, None):
            key = (one.line.artifact.name, rank)
            stops[key] = min(stops.get(key, one.line.number), one.line.number)
    return stops


def _within(line: Line, inside: Mapping[tuple[str, int | None], tuple[int, int]]) -> bool:
    span = inside.get((line.artifact.name, line.rank))
    return span is not None and span[0] <= line.number <= span[1]


def _leading(lines: Sequence[Line]) -> frozenset[str]:
    """Shapes of lines that begin with a number which takes several small values: these print their rank first."""
    seen: dict[str, set[int]] = defaultdict(set)
    for line in lines:
        if line.rank is None and (found := _FIRST_NUMBER.match(line.text)):
            seen[shape(line.text)].add(int(found["rank"]))
    return frozenset(one for one, ranks in seen.items() if len(ranks) > 1 and max(ranks) < 4 * len(ranks) + 8)


def _processes(lines: Sequence[Line]) -> dict[tuple[str | None, int], int]:
    """The rank of each process that begins a line with it: Ray's tag names the process only."""
    said: dict[tuple[str | None, int], set[int]] = defaultdict(set)
    for line in lines:
        if line.rank is None and line.pid is not None and (found := _RANK_WORD.search(line.text[:80])):
            said[line.host, line.pid].add(int(found["rank"]))
    return {process: next(iter(ranks)) for process, ranks in said.items() if len(ranks) == 1}


def named_rank(text: str) -> int | None:
    """The rank that a line names."""
    found = _RANK_WORD.search(text)
    return int(found["rank"]) if found else None


def _speaker(line: Line, leading: frozenset[str]) -> int | None:
    if line.rank is not None:
        return line.rank
    if (rank := named_rank(line.text)) is not None:
        return rank
    if leading and (found := _FIRST_NUMBER.match(line.text)):
        return int(found["rank"])
    if (found := _TWO_WORDS.match(line.text)) and says("says-clean-end", line):
        return int(found["rank"])
    return None


def _differing(said: Mapping[int, Sequence[Line]]) -> Iterator[Difference]:
    ranks = {rank: lines[-1] for rank, lines in said.items()}
    rows = aligned(ranks)
    width = min((len(one) for one in rows.values()), default=0)
    steps = {rank: found["step"] for rank, line in ranks.items() if (found := _STEP.search(line.text))}
    if len(rows) < 2 or len(set(steps.values())) > 1:
        return
    counters = _counters(said)
    for column in range(width):
        counts = Counter(row[column] for row in rows.values())
        if len(counts) < 2 or column in counters:
            continue
        (usual, often), (_, next_often) = counts.most_common(2)
        if often > next_often and often >= len(rows) - max(1, len(rows) // 4):
            odd = [rank for rank, row in rows.items() if row[column] != usual]
        elif len(rows) == 2 and 0.0 in counts:
            odd = [rank for rank, row in rows.items() if row[column] == 0.0]
            usual = max(counts)
        elif len(rows) == 2 and all(one == int(one) for one in counts) and _NOUNS.search(next(iter(ranks.values())).text):
            odd = [rank for rank, row in rows.items() if row[column] == min(counts)]
            usual = max(counts)
        else:
            continue
        other = next(rank for rank in rows if rank not in odd)
        for rank in odd:
            yield Difference(
                rank=rank,
                line=ranks[rank],
                mine=rows[rank][column],
                theirs=usual,
                noun=_noun(ranks[rank].text, rows[rank][column]),
                other=ranks[other],
            )


def _counters(said: Mapping[int, Sequence[Line]]) -> set[int]:
    """The columns that only grow from line to line of a rank: they count, and differ where a rank is behind."""
    found: set[int] = set()
    for rank, lines in said.items():
        if len(lines) > 1:
            rows = [_row(line, rank) for line in lines[-3:]]
            for column in range(min(map(len, rows))):
                values = [row[column] for row in rows]
                if all(first < then for first, then in pairwise(values)):
                    found.add(column)
    return found


def _row(line: Line, rank: int) -> list[float]:
    return [one for one in _tokens(line.text, rank) if isinstance(one, float)]


_NOUNS = re.compile(
    r"(?i)\b(?:batch(?:es)?|samples?|examples?|images?|tokens?|frames?|files?|shards?|records?|rows?|items?|chunks?|sequences?|"
    r"documents?|videos?|pixels?|boxes|objects?|nodes?|edges?|points?|steps?|iterations?|micro_?batch(?:es)?|experts?|pairs?|"
    r"utterances?|patches|masks?|labels?|targets?|positives?|clips?|graphs?|queries|prompts?|rollouts?|length|len|size|count|num\w*|n_\w+|\w*loader|dataset)\b"
)


def _noun(text: str, value: float) -> str:
    """The word nearest to the number that something can be counted by: after it first, then before it."""
    wanted = str(int(value)) if value == int(value) else str(value)
    for found in re.finditer(rf"(?<![\d.]){re.escape(wanted)}(?![\d.]*\d)", text):
        after = _NOUNS.search(text, found.end(), found.end() + 16)
        before = list(_NOUNS.finditer(text, max(0, found.start() - 30), found.start()))
        if after and text[found.end() : after.start()].strip(" _-") == "":
            return after[0]
        if before:
            return before[-1][0]
        if after:
            return after[0]
    return ""
