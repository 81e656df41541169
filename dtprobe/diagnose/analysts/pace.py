"""Whether one rank is slower than its peers, by the times that every rank prints step by step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from dtprobe.diagnose.case import Case, Finding, Line, quote
from dtprobe.diagnose.facts.raised import raised
from dtprobe.diagnose.facts.timeouts import waits
from dtprobe.diagnose.facts.words import words

SAMPLES = 3
"""So many steps of every rank are needed."""
SLOWER = 1.5
"""The slow rank takes this many times as long as the middle one."""
_TIMED = re.compile(
    r"(?i)\b(?P<name>[a-z][\w /-]{0,24}?)[\"']?\s*[:=(]?\s*(?P<value>\d+(?:\.\d+)?)\s?(?P<unit>ms|msec|milliseconds|s|sec|seconds)\b"
)
_OWN_WORK = re.compile(r"(?i)forward|fwd|backward|bwd|comput|kernel|optim|work|busy|gemm|model|train[_ ]?step|cpu|gpu")


def analyse(case: Case) -> Iterator[Finding]:
    """A finding where one rank's own work takes longer than everybody else's in every step that was printed."""
    if waits(case).timeouts or raised(case):
        return
    taken: dict[str, dict[int, list[tuple[float, Line]]]] = defaultdict(lambda: defaultdict(list))
    for rank, lines in words(case).by_rank.items():
        for line in lines:
            for found in _TIMED.finditer(line.text):
                name = found["name"].strip().lower().rpartition(" ")[2]
                if _OWN_WORK.search(name):
                    taken[name][rank].append((float(found["value"]), line))
    for name, ranks in taken.items():
        if (finding := _slowest(name, ranks)) is not None:
            yield finding
            return


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
    line = ranks[slow][-1][1]
    other = next(samples[-1][1] for rank, samples in ranks.items() if rank != slow)
    return Finding(
        mode="straggler",
        analyst="pace",
        likelihood=0.7,
        because=f"Rank {slow} takes {middles[slow] / others:.1f} times as long as its peers for {name}, in every step.",
        first=slow,
        suspects=(slow,),
        host=line.host,
        evidence=(quote(line, "cause"), quote(other, "confirm")),
        not_proven="whether its host, its device or its share of the work is to blame",
    )
