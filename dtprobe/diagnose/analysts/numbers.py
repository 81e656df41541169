"""The same value printed by every rank: who holds another loss scale or another checksum than its peers."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dtprobe.diagnose.case import Case, Finding, First, Line, quote
from dtprobe.diagnose.facts.words import SPOKEN, named_rank

ANALYST = "numbers"
SCALES, DIGESTS = 0.86, 0.8
SHOWN = 3
_VALUE = r"(?P<value>0x[0-9a-fA-F]+|[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|[0-9a-f]{6,64})"
_KINDS = {
    "scaler-divergence": re.compile(
        rf"(?i)\b(?P<key>(?:loss|grad|amp)?[ _-]?scal(?:e|er|ing))\b(?: factor)?[\"']?\s*[:=]?\s*{_VALUE}(?![\w.%])"
    ),
    "silent-corruption": re.compile(
        rf"(?i)\b(?P<key>(?:[a-z]+[ _-])?(?:check ?sum|digest|crc(?:32)?|md5|sha\d*|finger ?print|hash|param(?:eter)?s?[ _-](?:norm|sum|mean)|weights?[ _-](?:norm|sum|mean)))\b"
        rf"(?: of [\w.]+)?[\"']?\s*[:=]?\s*{_VALUE}(?![\w.%])"
    ),
}
_HINTS = {
    "scaler-divergence": ("scal",),
    "silent-corruption": (
        *("checksum", "check sum", "check_sum", "digest", "crc", "md5", "sha1", "sha2", "fingerprint", "finger print", "hash"),
        *("param_", "param ", "params", "parameter", "weight"),
    ),
}
"""Plain words, one of which stands in or before the name."""
NEAR, LONGEST = 80, 2000
_STEP = re.compile(r"(?i)\b(?:global[_ ]?)?(?:step|iter(?:ation)?|update|epoch)s?\b[\s:=#'\"\[(]*(?P<step>\d+)")
_OVERFLOW = re.compile(
    r"(?i)\boverflow\w*\b|\b(?:skip(?:ped|ping)?|dropp(?:ed|ing))\b.{0,24}\b(?:step|update|optimizer)\b|\b(?:step|update)\b.{0,12}\bskipped\b|\bfound[_ ]?inf\b|\binf(?:/nan)? (?:in|grad)"
)


@dataclass(frozen=True, slots=True)
class Said:
    """A value as a rank printed it."""

    value: str
    line: Line


def analyse(case: Case) -> Iterator[Finding]:
    """The first difference of either kind. Replicas that skip another step hold other parameters, too: the scale comes first."""
    tables = _tables(case)
    for mode, likelihood in (("scaler-divergence", SCALES), ("silent-corruption", DIGESTS)):
        apart = _apart(tables[mode])
        if apart is not None:
            yield _finding(case, mode, likelihood, *apart)
            return


Table = Mapping[tuple[str, int], Mapping[int, Said]]


def _tables(case: Case) -> dict[str, dict[tuple[str, int], dict[int, Said]]]:
    """What each rank printed under a name at a step, or as its n-th such line where no step is told."""
    found: dict[str, dict[tuple[str, int], dict[int, Said]]] = {mode: defaultdict(dict) for mode in _KINDS}
    turns: Counter[tuple[str, str, int]] = Counter()
    for line in case.lines:
        if line.artifact.kind not in SPOKEN and line.artifact.kind != "jsonl":
            continue
        lower = line.text[:LONGEST].lower()
        hints = {mode: at for mode, words in _HINTS.items() if (at := _at(lower, words)) >= 0}
        if not hints:
            continue
        rank = line.rank if line.rank is not None else named_rank(line.text)
        if rank is None:
            continue
        for mode, at in hints.items():
            # only what stands around the word is looked at
            match = _KINDS[mode].search(line.text[max(0, at - NEAR) : at + NEAR])
            if match is None or _OVERFLOW.search(line.text[:LONGEST]):
                continue
            key = re.sub(r"[ _-]", "", match["key"].lower())
            step = _STEP.search(line.text)
            turns[mode, key, rank] += 1
            place = int(step["step"]) if step else -turns[mode, key, rank]
            found[mode][key, place].setdefault(rank, Said(match["value"].lower(), line))
    return found


def _at(lower: str, words: Sequence[str]) -> int:
    return next((at for word in words if (at := lower.find(word)) >= 0), -1)


def _apart(table: Table) -> tuple[str, Mapping[int, Said]] | None:
    """The first place at which ranks differ, of a name under which they mostly agree: what differs at every place is each rank's own."""
    agreeing: Counter[str] = Counter()
    differing: dict[str, list[Mapping[int, Said]]] = defaultdict(list)
    for (key, _place), said in sorted(table.items(), key=lambda item: (item[0][0], abs(item[0][1]))):
        values = Counter(one.value for one in said.values())
        if len(said) < 2:
            continue
        if len(values) == 1:
            agreeing[key] += 1
        else:
            differing[key].append(said)
    for key, places in differing.items():
        first = places[0]
        held = Counter(one.value for one in first.values()).most_common()
        majority = len(first) > 2 and held[0][1] > len(first) / 2
        if agreeing[key] or majority:
            return key, first
    return None


def _finding(case: Case, mode: str, likelihood: float, key: str, said: Mapping[int, Said]) -> Finding:
    values = Counter(one.value for one in said.values())
    usual, often = values.most_common(1)[0]
    odd = sorted(rank for rank, one in said.items() if one.value != usual)
    if often * 2 <= len(said):
        odd = _lower(said) if mode == "scaler-divergence" else sorted(said)
    skips = _skips(case, odd) if mode == "scaler-divergence" else []
    if skips and len(odd) != 1:
        odd = sorted({rank for line in skips if (rank := _about(line)) is not None}) or odd
    first: First = odd[0] if len(odd) == 1 else None
    chief = odd[0]
    other = next((rank for rank in said if rank not in odd), next(rank for rank in said if rank != chief))
    word = key.replace("lossscale", "loss scale")
    return Finding(
        mode=mode,
        analyst=ANALYST,
        likelihood=likelihood,
        because=f"Rank {chief} holds {word} {said[chief].value} where rank {other} holds {said[other].value}; replicas hold the same."
        if chief in said
        else f"The ranks hold different values of {word}.",
        first=first,
        suspects=tuple(odd),
        evidence=(
            *(quote(line, "cause") for line in skips[:2]),
            *(quote(said[rank].line, "cause") for rank in odd[:SHOWN] if rank in said),
            quote(said[other].line, "confirm"),
        ),
        not_proven="why only this rank's gradients overflowed"
        if mode == "scaler-divergence"
        else "what changed the data: memory, a kernel, or code that runs on one rank only",
    )


def _lower(said: Mapping[int, Said]) -> list[int]:
    """The ranks with the smallest scale: it was reduced there."""
    try:
        least = min(float(one.value) for one in said.values())
        return sorted(rank for rank, one in said.items() if float(one.value) == least)
    except ValueError:
        return sorted(said)


def _about(line: Line) -> int | None:
    named = named_rank(line.text)
    return line.rank if named is None else named


def _skips(case: Case, odd: Sequence[int]) -> list[Line]:
    """Lines in which these ranks say that they skipped a step."""
    return [
        line
        for line in case.lines
        if line.artifact.kind in SPOKEN and _OVERFLOW.search(line.text[:500]) and _about(line) in odd
    ]
