"""How much of each step is waited for input: the times that training loops print, beside what disks and GPUs did."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median

from dtprobe.diagnose.case import Case, Finding, First, Line, quote
from dtprobe.diagnose.facts.raised import raised
from dtprobe.diagnose.facts.timeouts import waits
from dtprobe.diagnose.facts.words import SPOKEN, named_rank

ANALYST = "feeding"
STARVED, CONFIRMED = 0.78, 0.86
IDLE_PERCENT, TAKEN_MIB = 15, 1000
SAMPLES = 3
MOST_LINES = 20_000
"""Of more lines every n-th tells as much of the share."""
SHARE = 0.6
LEAST_S = 0.02
"""Shorter waits are no trouble, whatever their share."""
_PAIR = re.compile(
    r"(?i)(?<![\w.])(?P<name>[a-z][a-z_]*(?:[ _-](?:time|wait|load(?:ing|er)?))?)[\"']?(?:\s*[:=]\s*|\s+)(?P<value>\d+(?:\.\d+)?)\s?(?P<unit>ms|s|sec|secs|seconds|%)?(?![\w.])"
)
_INPUT = re.compile(
    r"(?i)^(?:data(?:[ _-]?(?:time|wait|load\w*))?|(?:data)?load(?:er|ing)?(?:[ _-](?:time|wait|data))?|fetch(?:[ _-]?(?:time|data|wait))?|input(?:[ _-](?:time|wait))?|io(?:[ _-](?:time|wait))?|prefetch(?:[ _-]wait)?|batch[ _-]wait|next[ _-]batch)$"
)
_WHOLE = re.compile(r"(?i)^(?:time|(?:step|iter(?:ation)?|batch|total|elapsed)(?:[ _-]time)?|total)$")
_WORK = re.compile(r"(?i)^(?:fwd|bwd|forward|backward|compute|comp|opt(?:im|imizer)?|train|model|gpu|step)(?:[ _-]time)?$")
_COUNTED = re.compile(r"(?i)^(?:step|iter(?:ation)?|batch|total)$")
"""With a bare whole number these are the step's number, not its time."""
_BUSY_DISK = re.compile(r"^\s*(?P<device>[\w./-]+)(?:\s+[\d.]+){3,}\s+(?P<util>9[5-9](?:\.\d+)?|100(?:\.\d+)?)\s*$")
_IDLE_GPU = re.compile(r"\b(?P<used>\d+)MiB / +\d+MiB \| +(?P<util>\d{1,3})% ")


def analyse(case: Case) -> Iterator[Finding]:
    """A finding where most of the step goes to waiting for input, on one rank or on all; none where the job hung or raised."""
    if waits(case).timeouts or raised(case):
        return
    shares: dict[int | None, list[tuple[float, Line]]] = {}
    for line in case.lines[:: len(case.lines) // MOST_LINES + 1]:
        if line.artifact.kind in SPOKEN and (share := _share(line.text)) is not None:
            rank = line.rank if line.rank is not None else named_rank(line.text)
            shares.setdefault(rank, []).append((share, line))
    told = {rank: one for rank, one in shares.items() if len(one) >= SAMPLES}
    starved = {rank: one for rank, one in told.items() if median(share for share, _ in one) >= SHARE}
    if not starved:
        return
    ranks = sorted(rank for rank in starved if rank is not None)
    alone = len(told) > 2 and len(ranks) == 1 and None not in told
    first: First = ranks[0] if alone else "all" if len(ranks) != 1 or None in starved else None
    samples = starved[ranks[0]] if ranks else starved[None]
    share, line = max(samples, key=lambda one: one[0])
    beside = list(_beside(case))
    yield Finding(
        mode="data-starvation",
        analyst=ANALYST,
        likelihood=CONFIRMED if beside else STARVED,
        because=f"{median(each for each, _ in samples):.0%} of a step is waited for input"
        + (f" on rank {ranks[0]} alone." if alone else "."),
        first=first,
        suspects=(ranks[0],) if alone else (),
        host=line.host if alone else None,
        evidence=(
            quote(line, "cause"),
            *(quote(one, "cause") for _, one in samples[-1:]),
            *(quote(one, "confirm") for one in beside[:3]),
        ),
        not_proven="" if beside else "why the input is slow: the disk's and the network's use would tell",
    )


def _share(text: str) -> float | None:
    """The part of a step that is waited for input, by the times or the percentage that a line tells."""
    if len(text) > 1000 or not any(word in text.lower() for word in ("data", "load", "fetch", "input", "io", "batch")):
        return None
    waited = whole = None
    parts = 0.0
    for found in _PAIR.finditer(text):
        name, value = found["name"].strip(), float(found["value"]) / (1000 if found["unit"] == "ms" else 1)
        if _INPUT.match(name):
            if found["unit"] == "%":
                return min(value / 100, 1.0)
            waited = value if waited is None else waited
        elif found["unit"] == "%" or (_COUNTED.match(name) and not found["unit"] and "." not in found["value"]):
            continue
        elif _WHOLE.match(name):
            whole = value if whole is None else whole
        elif _WORK.match(name):
            parts += value
    if waited is None or waited < LEAST_S:
        return None
    whole = whole if whole is not None and whole >= waited else waited + parts if parts else None
    return waited / whole if whole else None


def _beside(case: Case) -> Iterator[Line]:
    """Disks that are used to the full, and GPUs that do nothing though memory is taken."""
    return (
        line for line in case.lines if (line.text.rstrip()[-1:].isdigit() and _BUSY_DISK.match(line.text)) or _idle(line.text)
    )


def _idle(text: str) -> bool:
    found = _IDLE_GPU.search(text) if "MiB" in text else None
    return found is not None and int(found["util"]) <= IDLE_PERCENT and int(found["used"]) > TAKEN_MIB
