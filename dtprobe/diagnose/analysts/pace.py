"""Whether one rank is slower than its peers, by the times that every rank prints step by step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from dtprobe.diagnose.case import Artifact, Case, Finding, Line, quote
from dtprobe.diagnose.facts.raised import raised
from dtprobe.diagnose.facts.timeouts import waits
from dtprobe.diagnose.facts.words import words

SAMPLES = 3
"""So many steps of every rank are needed."""
SLOWER = 1.5
"""The slow rank takes this many times as long as the middle one."""
WAITED = 4.0
"""Its peers wait this many times as long as the rank that they wait for."""
CLOCK = 0.6
LEAST_RANKS, LONGEST = 3, 4096
_EACH = re.compile(r"(?i)(?<![\w-])(?:rank[ _]?|r)(?P<rank>\d{1,5})\s*[:=]\s*")
_LIST = re.compile(
    r"(?i)(?:\bms\b|time|seconds)[^\[\n]{0,20}(?:per|each|by|of all|of the) (?:rank|worker|gpu)s?[^\[\n]{0,12}\[\s*(?P<values>\d+(?:\.\d+)?(?:,\s*\d+(?:\.\d+)?){2,})\s*\]"
)
_SECOND = ("r1", "R1", "k1", "k 1", "k_1", " rank", " worker", " gpu")
"""Whatever lists ranks has one of these, which is quicker to look for."""
_NAMED = re.compile(r"^\s*[A-Za-z]")
MOST_GPUS = 16
_MHZ = re.compile(r"^(\d+(?:\.\d+)?)(?: MHz)?$")
_WAIT = re.compile(r"(?i)wait|all_?reduce|\bcomm|sync|collective|exposed")
_TIMED = re.compile(
    r"(?i)\b(?P<name>[a-z][\w /-]{0,24}?)[\"']?\s*[:=(]?\s*(?P<value>\d+(?:\.\d+)?)\s?(?P<unit>ms|msec|milliseconds|s|sec|seconds)\b"
)
_OWN_WORK = re.compile(r"(?i)forward|fwd|backward|bwd|comput|kernel|optim|work|busy|gemm|model|train[_ ]?step|cpu|gpu")


def analyse(case: Case) -> Iterator[Finding]:
    """A finding where one rank's own work takes longer than everybody else's in every step that was printed."""
    if waits(case).timeouts or raised(case):
        return
    yield from _clocks(case)
    taken: dict[str, dict[int, list[tuple[float, Line]]]] = defaultdict(lambda: defaultdict(list))
    waited: dict[str, dict[int, list[tuple[float, Line]]]] = defaultdict(lambda: defaultdict(list))
    for rank, lines in words(case).by_rank.items():
        for line in lines:
            for found in _TIMED.finditer(line.text):
                name = found["name"].strip().lower().rpartition(" ")[2]
                if _OWN_WORK.search(name):
                    taken[name][rank].append((float(found["value"]), line))
                elif _WAIT.search(name):
                    waited[name][rank].append((float(found["value"]), line))
    for line in case.lines:
        for rank, text in _shares(line):
            for found in _TIMED.finditer(text):
                name = found["name"].strip().lower().rpartition(" ")[2]
                if _WAIT.search(name):
                    waited[name][rank].append((float(found["value"]), line))
                else:
                    taken[name][rank].append((float(found["value"]), line))
    for name, ranks in taken.items():
        if (finding := _slowest(name, ranks)) is not None:
            yield finding
            return
    for name, ranks in waited.items():
        if (finding := _awaited(name, ranks)) is not None:
            yield finding
            return


def _shares(line: Line) -> Iterator[tuple[int, str]]:
    """What one line tells of each rank: `r0: fwd 81 ms, r1: fwd 84 ms, ...`; nothing where it tells of fewer than three."""
    if len(line.text) > LONGEST or not any(head in line.text for head in _SECOND):
        return
    if (listed := _LIST.search(line.text)) is not None:
        yield from enumerate(f"step {value} ms" for value in listed["values"].split(","))
        return
    heads = list(_EACH.finditer(line.text))
    if len({head["rank"] for head in heads}) < LEAST_RANKS or len({head["rank"] for head in heads}) != len(heads):
        return
    ends = [*(head.start() for head in heads[1:]), len(line.text)]
    for head, end in zip(heads, ends, strict=True):
        text = line.text[head.end() : end]
        yield int(head["rank"]), text if _NAMED.match(text) else f"step {text.lstrip()}"


def _awaited(name: str, ranks: dict[int, list[tuple[float, Line]]]) -> Finding | None:
    """The one rank that hardly waits, where all others wait for somebody in every step."""
    if len(ranks) < 3 or min(map(len, ranks.values())) < SAMPLES:
        return None
    middles = {rank: median(value for value, _line in samples) for rank, samples in ranks.items()}
    chief = min(middles, key=lambda rank: middles[rank])
    least = min(value for rank, samples in ranks.items() if rank != chief for value, _line in samples)
    most = max(value for value, _line in ranks[chief])
    if least <= 0 or most * WAITED > least:
        return None
    return _behind(
        chief,
        ranks,
        f"All ranks but {chief} wait {least / max(most, 1e-9):.0f} times as long or longer for {name}: it is rank {chief} that they wait for.",
    )


def _clocks(case: Case) -> Iterator[Finding]:
    """A GPU of one host that runs far below the clock of its neighbours, by a table of nvidia-smi."""
    for artifact, lines in _tables(case):
        head = [one.strip().lower() for one in lines[0].text.split(",")]
        column = next((at for at, one in enumerate(head) if one.startswith("clocks.") and ("sm" in one or "gr" in one)), None)
        place = next((at for at, one in enumerate(head) if one in ("index", "gpu")), None)
        if column is None or place is None:
            continue
        clocks: dict[int, tuple[float, Line]] = {}
        for line in lines[1:]:
            cells = [one.strip() for one in line.text.split(",")]
            if len(cells) != len(head) or not cells[place].isdigit() or not (value := _MHZ.match(cells[column])):
                break
            clocks[int(cells[place])] = (float(value[1]), line)
        if len(clocks) < 3:
            continue
        slow = min(clocks, key=lambda index: clocks[index][0])
        others = median(value for index, (value, _line) in clocks.items() if index != slow)
        if clocks[slow][0] > CLOCK * others:
            continue
        seats = {seat.host for seat in case.who.seats if seat.host}
        rank = slow if len(seats) <= 1 and len(clocks) >= len(case.who.seen) else None
        yield Finding(
            mode="straggler",
            analyst="clocks",
            likelihood=0.6,
            because=f"GPU {slow} runs at {clocks[slow][0]:.0f} MHz, its neighbours at {others:.0f} MHz.",
            first=rank,
            suspects=(rank,) if rank is not None else (),
            host=artifact.host,
            evidence=(
                quote(clocks[slow][1], "cause"),
                quote(next(line for index, (_v, line) in clocks.items() if index != slow), "confirm"),
            ),
            not_proven="that it was so while the job ran",
        )


def _tables(case: Case) -> Iterator[tuple[Artifact, list[Line]]]:
    """Heads of such tables with the lines below them."""
    for at, line in enumerate(case.lines):
        if "clocks." in line.text and "," in line.text:
            yield line.artifact, list(case.lines[at : at + MOST_GPUS + 1])


def _slowest(name: str, ranks: dict[int, list[tuple[float, Line]]]) -> Finding | None:
    if len(ranks) < 2 or min(map(len, ranks.values())) < SAMPLES:
        return None
    middles = {rank: median(value for value, _line in samples) for rank, samples in ranks.items()}
    slow = max(middles, key=lambda rank: middles[rank])
    others = median(value for rank, value in middles.items() if rank != slow)
    fastest = min(value for value, _line in ranks[slow])
    apart = all(fastest > value for rank, samples in ranks.items() if rank != slow for value, _line in samples)
    if not apart or others <= 0 or middles[slow] < SLOWER * others:
        return None
    return _behind(
        slow, ranks, f"Rank {slow} takes {middles[slow] / others:.1f} times as long as its peers for {name}, in every step."
    )


def _behind(slow: int, ranks: dict[int, list[tuple[float, Line]]], because: str) -> Finding:
    line = ranks[slow][-1][1]
    other = next(samples[-1][1] for rank, samples in ranks.items() if rank != slow)
    return Finding(
        mode="straggler",
        analyst="pace",
        likelihood=0.7,
        because=because,
        first=slow,
        suspects=(slow,),
        host=line.host,
        evidence=(quote(line, "cause"), quote(other, "confirm")),
        not_proven="whether its host, its device or its share of the work is to blame",
    )
