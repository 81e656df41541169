"""What labels one artifact's lines carry by habit: only a look at many lines tells `3: text` of srun from a numbered list."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from dtprobe.diagnose.lines import columns, stamps

_NODES = 512
ENOUGH = 3
"""So many lines must carry a label before it is believed."""
_NUMBERS = {
    "srun": (re.compile(r" *(?P<label>\d{1,6}):(?: |$)"), 0.8),
    "hydra": (re.compile(r"\[(?P<label>\d{1,6})\]:? ?(?![\d:])"), 0.6),
}
_CONTAINER = r"(?: (?:pytorch|main|trainer|worker|container|app))? "
_NAMES = (
    (r"[A-Za-z][\w.-]{0,80}", r" *\| ?", 0.6),  # compose, and what prefixes each line with its node
    (r"[A-Za-z][\w.-]{0,80}", ": ", 0.7),  # pdsh
    (r"[a-z][a-z0-9.-]{0,80}-\d{1,5}|[a-z][a-z0-9.-]{0,80}-[a-z0-9]{8,10}-[a-z0-9]{5}", _CONTAINER, 0.6),  # stern
)
_LIKE_A_HOST = re.compile(
    r"(?=.*[\d-])(?!(?i:step|epoch|iter|iteration|gpu|cuda|npu|core|cpu|layer|batch|rank|loss|it|ep)[-_]?\d*$)[\w.-]+"
)
_RANK_INSIDE = re.compile(r"\[(?:rank|Rank )(\d{1,6})\]")


@dataclass(frozen=True, slots=True)
class Habits:
    """`label` matches what stands before each line, and `means` says what it is; `then` what stands behind a host or a node."""

    label: re.Pattern[str] | None = None
    means: Literal["rank", "local", "node", "host"] = "rank"
    then: Habits | None = None


NO_HABITS = Habits()


def learned(sample: Sequence[str]) -> Habits:
    """The habits of these lines."""
    lines = [_peeled(one) for one in sample if one.strip()]
    first = _learned(lines)
    if first.label is None or first.means not in ("node", "host"):
        return first
    then = _learned([_peeled(one[match.end() :]) for one in lines if (match := first.label.match(one))])
    return replace(first, then=then) if then.label is not None and then.means in ("rank", "local") else first


def _learned(lines: Sequence[str]) -> Habits:
    for pattern, share in _NUMBERS.values():
        found = [match for one in lines if (match := pattern.match(one))]
        if len(found) >= ENOUGH and len(found) >= share * len(lines) and not _listing(found):
            return Habits(pattern, "node" if _contradicted(found) else "rank")
    if (column := columns.column(lines)) is not None:
        pattern, means = column
        found = [match for one in lines if (match := pattern.match(one))]
        return Habits(pattern, "node" if means == "rank" and _contradicted(found) else means)
    for name, tail, share in _NAMES:
        pattern = re.compile(f"(?P<label>{name}){tail}")
        matches = [match["label"] for one in lines if (match := pattern.match(one))]
        names = Counter(one for one in matches if _LIKE_A_HOST.fullmatch(one))
        many = sum(names.values())
        if many >= ENOUGH and many >= share * len(lines) and many >= 2 * len(names):
            choice = "|".join(re.escape(one) for one in sorted(names, key=len, reverse=True)[:_NODES])
            return Habits(re.compile(f"(?P<label>{choice}){tail}"), "host")
    return NO_HABITS


def _peeled(line: str) -> str:
    """Without the stamp of a container's log."""
    stamp = stamps.at_start(line)
    return line[stamp.end :] if stamp else line


def _listing(found: Sequence[re.Match[str]]) -> bool:
    """Line numbers of a listing: each is above the one before, and what follows differs."""
    numbers = [int(one["label"]) for one in found]
    counted = len(numbers) > 2 and all(later > earlier for earlier, later in pairwise(numbers))
    return counted and len({one.string[one.end() :] for one in found}) > len(found) // 2


def _contradicted(found: Sequence[re.Match[str]]) -> bool:
    """A label that a rank's own tag beside it contradicts: one task of srun that started many ranks."""
    for match in found:
        tag = _RANK_INSIDE.match(match.string, match.end())
        if tag and int(tag[1]) != int(match["label"]):
            return True
    return False
