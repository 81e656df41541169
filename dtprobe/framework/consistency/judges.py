"""Who differs, from what ranks said: pure functions from plain JSON to plain JSON, run on whichever rank came last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dtprobe.framework.agreement import Said
from dtprobe.framework.consistency.report import place, shown

CAMPS = 16
"""Sets of ranks that hold the same of which one rank each is asked for details."""

_OF_ALL = ("dtypes", "shapes", "placements", "requires_grad")
_BITS_NEED = {"dtypes", "shapes", "placements"}
"""Where one of these differs the bits cannot be compared."""

Camps = Sequence[Sequence[int]]
"""Ranks that hold the same, the largest set first; the first rank of each speaks for it."""


def camps(parts: Mapping[int, Mapping[str, str]]) -> list[list[int]]:
    """The sets of ranks that contradict each other, from the digests each rank has of its parts; empty when none do.

    A part is compared between the ranks that have it; ranks that have no disputed part are left out.
    """
    every = sorted({part for own in parts.values() for part in own})
    disputed = [part for part in every if len({own[part] for own in parts.values() if part in own}) > 1]
    sets: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, own in sorted(parts.items()):
        if key := tuple((part, own[part]) for part in disputed if part in own):
            sets.setdefault(key, []).append(rank)
    return sorted(sets.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def judge_parts(heard: Mapping[int, Said]) -> Said:
    """First exchange: nothing when all parts agree, else the camps and the largest number of pages of entries."""
    found = camps({rank: said["parts"] for rank, said in heard.items()})
    return {"camps": found, "pages": max(said["pages"] for said in heard.values())} if found else {}


def judge_pages(heard: Mapping[int, list[Said]]) -> Said:
    """The first page of entries on which the ranks that speak differ, and on how many they do."""
    pages = {rank: said[0]["pages"] for rank, said in heard.items() if said[0]}
    count = max(map(len, pages.values()))
    differing = [
        number
        for number in range(count)
        if camps({rank: own[number] if number < len(own) else {"": ""} for rank, own in pages.items()})
    ]
    return {"page": differing[0], "differing": len(differing)}


def judge_rows(heard: Mapping[int, list[Said]], among: Camps, *, limit: int, whole: bool) -> Said:
    """Entry by entry: the `findings` that need no further look, the `targets` whose bits are to be bisected, and how many `more`.

    `whole` says that the rows are all there are, not one page of them.
    """
    rows = {ranks[0]: {row["name"]: row for row in heard[ranks[0]][0]["rows"]} for ranks in among}
    camp = {ranks[0]: list(ranks) for ranks in among}
    findings = _names({rank: list(own) for rank, own in rows.items()}, camp, whole)
    targets: list[dict[str, Any]] = []
    first = next(iter(rows.values()))
    for name in (name for name in first if all(name in own for own in rows.values())):
        each = {rank: own[name] for rank, own in rows.items()}
        differing = [field for field in _OF_ALL if _differ(each, field)]
        findings += [_finding(name, field, {rank: row[field] for rank, row in each.items()}, camp) for field in differing]
        if _BITS_NEED & set(differing):
            continue
        for cohort in sorted({row["cohort"] for row in each.values()}):
            own = {rank: row for rank, row in each.items() if row["cohort"] == cohort}
            if _differ(own, "local"):  # nothing keeps DTensor.from_local from being given what its placements do not allow
                findings.append(_finding(name, "shapes", {rank: f"{row['local']} here" for rank, row in own.items()}, camp))
                continue
            if _differ(own, "strides"):
                findings.append(_finding(name, "strides", {rank: row["strides"] for rank, row in own.items()}, camp))
            if not _differ(own, "values"):
                continue
            if any("text" in row for row in own.values()):
                findings.append(_finding(name, "values", {rank: row["text"] for rank, row in own.items()}, camp))
            else:
                row = next(iter(own.values()))
                targets.append({"name": name, "ranks": sorted(own), "dtype": row["dtypes"], "shape": row["shapes"]})
    more = max(0, len(findings) + len(targets) - limit)
    findings = findings[:limit]
    targets = targets[: limit - len(findings)]
    return {"findings": findings, "targets": targets, "more": more, **({} if targets else {"wrong": True})}


def judge_spans(heard: Mapping[int, list[Said]], targets: Sequence[Said], among: Camps) -> Said:
    """For each target still open, by its number: the first differing span and how many differ, or the finding it ends in."""
    camp = {ranks[0]: list(ranks) for ranks in among}
    spans: dict[str, Any] = {}
    findings: dict[str, Any] = {}
    for number, target in enumerate(targets):
        said = {rank: heard[rank][0].get(str(number)) for rank in target["ranks"]}
        told = {rank: one for rank, one in said.items() if one is not None}
        if not told:
            continue
        digests = [one["digests"] for one in told.values()]
        differing = [at for at, each in enumerate(zip(*digests, strict=False)) if len(set(each)) > 1]
        if not differing:
            changed = dict.fromkeys(told, "bits that changed while they were compared")
            findings[str(number)] = _finding(target["name"], "values", changed, camp)
        elif any("elements" in one for one in told.values()):
            findings[str(number)] = _element(target, told, differing[0], camp)
        else:
            spans[str(number)] = [differing[0], len(differing), min(map(len, digests))]
    return {"spans": spans, "findings": findings, **({} if spans else {"wrong": True})}


def _element(target: Said, told: Mapping[int, Said], at: int, camp: Mapping[int, list[int]]) -> dict[str, Any]:
    first = next(iter(told.values()))
    index = first["first"] + at
    held = _held({rank: (one["elements"][at], one["digests"][at]) for rank, one in told.items()}, camp)
    local = place(index, tuple(first["shape"]))
    where = [a + b for a, b in zip(local, first["offset"], strict=True)] if first["offset"] is not None else None
    return {
        "name": target["name"],
        "field": "values",
        "held": held,
        "dtype": target["dtype"],
        "shape": target["shape"],
        "index": index,
        "at": where,
    }


def _names(names: Mapping[int, list[str]], camp: Mapping[int, list[int]], whole: bool) -> list[dict[str, Any]]:
    every = list(dict.fromkeys(name for own in names.values() for name in own))
    missing = [name for name in every if not all(name in own for own in map(set, names.values()))]
    if whole and missing:
        return [
            _finding(name, "names", {rank: "present" if name in own else "absent" for rank, own in names.items()}, camp)
            for name in missing
        ]
    longest = max(map(len, names.values()))
    for at in range(longest):
        there = {rank: own[at] if at < len(own) else "" for rank, own in names.items()}
        if len(set(there.values())) > 1:
            told = {
                rank: f"{shown(name, 120)!r} at place {at}" if name else f"nothing at place {at}"
                for rank, name in there.items()
            }
            return [_finding(next(filter(None, there.values())), "names" if missing else "order", told, camp)]
    return []


def _differ(rows: Mapping[int, Said], field: str) -> bool:
    return len({row.get(field) if not isinstance(row.get(field), list) else tuple(row[field]) for row in rows.values()}) > 1


def _finding(name: str, field: str, told: Mapping[int, Any], camp: Mapping[int, list[int]]) -> dict[str, Any]:
    return {"name": name, "field": field, "held": _held({rank: (str(text), "") for rank, text in told.items()}, camp)}


def _held(told: Mapping[int, tuple[str, str]], camp: Mapping[int, list[int]]) -> list[dict[str, Any]]:
    """What each rank holds (text, bits), for all ranks that the speakers speak for; the most held first."""
    sets: dict[tuple[str, str], list[int]] = {}
    for rank, held in told.items():
        sets.setdefault(held, []).extend(camp[rank])
    ordered: Iterable[tuple[tuple[str, str], list[int]]] = sorted(sets.items(), key=lambda one: (-len(one[1]), min(one[1])))
    return [{"text": shown(text, 200), "bits": bits, "ranks": sorted(ranks)} for (text, bits), ranks in ordered]
