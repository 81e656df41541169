"""One rank's side of a comparison: digests first, and where they differ down to the element, each time a few kilobytes."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dtprobe.framework.agreement import Said
from dtprobe.framework.consistency.digest import BLOCK, block_sums, flat_bytes, short
from dtprobe.framework.consistency.entries import Entry
from dtprobe.framework.consistency.judges import CAMPS, Camps, judge_pages, judge_parts, judge_rows, judge_spans
from dtprobe.framework.consistency.meeting import Meeting
from dtprobe.framework.consistency.report import Difference, Held, Report, shown, verdict_of

PAGE = 2048
"""Entries whose descriptions a rank sends at a time: some 400 kB, where a TCPStore takes 8 MiB."""

_SPANS = 1024
"""Digests that a rank sends of one tensor at a time."""

_LEAF = 128
"""Bytes whose elements are sent themselves."""


class Comparison:
    """This rank's entries and the digests of their bits; `what` are the fields to compare."""

    def __init__(self, found: Sequence[Entry], what: Collection[str]) -> None:
        self.entries = sorted(found, key=lambda one: one.name) if "order" not in what else list(found)
        self._sums: dict[str, np.ndarray] = {}
        if "values" in what:
            held = {entry.name: entry.tensor for entry in self.entries if entry.tensor is not None}
            self._sums = dict(zip(held, block_sums(list(held.values())), strict=True))
        self._rows = [self._row(entry, what) for entry in self.entries]

    @property
    def size_bytes(self) -> int:
        return sum(entry.tensor.nbytes for entry in self.entries if entry.tensor is not None)

    def opening(self) -> dict[str, Any]:
        """What this rank says first."""
        return {"parts": _parts(self._rows), "pages": max(1, -(-len(self._rows) // PAGE))}

    def across(self, meeting: Meeting, said: Said, *, timeout_s: float, limit: int) -> Report:
        """Compare with the other ranks of the meeting; `said` is what this rank says beside its digests."""
        verdict = meeting.open({**said, **self.opening()}, judge_parts, timeout_s)
        alone = tuple(entry.name for entry in self.entries if entry.alone and entry.tensor is not None)
        report = functools.partial(Report, meeting.where, meeting.members, len(self.entries), self.size_bytes, alone)
        if not verdict:
            return report()
        every: Camps = verdict["camps"]
        among, unlisted = every[:CAMPS], every[CAMPS:]
        speaks = meeting.rank in {ranks[0] for ranks in among}
        page, others, pages = 0, 0, verdict["pages"]
        if pages > 1:
            parts = [_parts(self._rows[at : at + PAGE]) for at in range(0, len(self._rows), PAGE)]
            verdict = meeting.reach({"pages": parts} if speaks else {}, judge_pages, timeout_s)
            page, others = verdict["page"], verdict["differing"] - 1
        rows = self._rows[page * PAGE : (page + 1) * PAGE]
        judge = functools.partial(judge_rows, among=among, limit=limit, whole=pages == 1)
        verdict = meeting.reach({"rows": rows} if speaks else {}, judge, timeout_s)
        if pages > 1 and any(one["field"] in ("names", "order") for one in verdict["findings"]):
            others = 0  # pages after an entry that is missing differ for that alone
        findings = verdict["findings"] + self._bisected(meeting, verdict["targets"], among, timeout_s)
        return report(
            differences=tuple(_difference(one) for one in findings),
            more=verdict["more"] + others,
            unlisted=tuple(sorted(rank for ranks in unlisted for rank in ranks)),
        )

    def _bisected(self, meeting: Meeting, targets: Sequence[Said], among: Camps, timeout_s: float) -> list[dict[str, Any]]:
        """Follow the first differing span of each target down to its first differing element."""
        own = {entry.name: entry for entry in self.entries}
        ranges: dict[int, tuple[int, int]] = {}
        for number, target in enumerate(targets):
            if meeting.rank in target["ranks"]:
                ranges[number] = (0, self._tensor(own[target["name"]]).nbytes)
        open_ = set(range(len(targets)))
        findings: dict[int, dict[str, Any]] = {}
        blocks: dict[int, list[int]] = {}
        while open_:
            said = {str(number): self._said(own[targets[number]["name"]], *ranges[number]) for number in open_ & set(ranges)}
            verdict = meeting.reach(said, functools.partial(judge_spans, targets=targets, among=among), timeout_s)
            for key, (span, differing, count) in verdict["spans"].items():
                blocks.setdefault(int(key), [differing, count])
                if int(key) in ranges:
                    ranges[int(key)] = cuts(*ranges[int(key)])[span]
            for key, finding in verdict["findings"].items():
                findings[int(key)] = finding
                open_.discard(int(key))
        return [findings[number] | {"blocks": blocks.get(number, [0, 0])} for number in sorted(findings)]

    def _said(self, entry: Entry, low: int, high: int) -> dict[str, Any]:
        """Digests of the spans of bytes `low` to `high` of an entry, or what the elements there are."""
        tensor = self._tensor(entry)
        spans = cuts(low, high)
        if spans and high - low > BLOCK:
            sums = self._sums[entry.name]
            return {"digests": [short(sums[a // BLOCK : -(-b // BLOCK)].tobytes())[:16] for a, b in spans]}
        data = flat_bytes(tensor)[low:high].cpu().numpy().tobytes()
        if spans:
            return {"digests": [short(data[a - low : b - low])[:16] for a, b in spans]}
        size = tensor.itemsize
        texts = _texts(tensor, low // size, high // size)
        bits = [data[at : at + size] for at in range(0, len(data), size)]
        return {
            "first": low // size,
            "digests": [(each[::-1] if sys.byteorder == "little" else each).hex() for each in bits],
            "elements": texts,
            "shape": list(tensor.shape),
            "offset": [0] * tensor.dim() if not entry.placement else entry.offset,
        }

    def _row(self, entry: Entry, what: Collection[str]) -> dict[str, Any]:
        """What this rank says about an entry: the fields asked for, in JSON."""
        row: dict[str, Any] = {"name": entry.name, "cohort": entry.cohort}
        fields = {
            "dtypes": entry.dtype,
            "shapes": list(entry.shape),
            "placements": entry.placement,
            "requires_grad": entry.requires_grad,
            "strides": list(entry.strides),
        }
        row |= {field: value for field, value in fields.items() if field in what}
        if entry.placement and entry.tensor is not None:
            row["local"] = list(entry.tensor.shape)
        if "values" in what and entry.text is not None:
            row |= {"text": shown(entry.text, 200), "values": short(entry.text.encode())}
        elif "values" in what:
            row["values"] = short(self._sums[entry.name].tobytes())
        return row

    @staticmethod
    def _tensor(entry: Entry) -> torch.Tensor:
        assert entry.tensor is not None
        return entry.tensor


def cuts(low: int, high: int) -> list[tuple[int, int]]:
    """The spans into which bytes `low` to `high` are cut for the next look; none where the elements themselves are looked at."""
    if high - low <= _LEAF:
        return []
    step = -(-(high - low) // (BLOCK * _SPANS)) * BLOCK if high - low > BLOCK else _LEAF
    return [(at, min(at + step, high)) for at in range(low, high, step)]


def _parts(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Digests of what all ranks must have alike (under the empty name), and of what each cohort must."""
    local = ("cohort", "local", "strides", "values", "text")
    alike = [{key: value for key, value in row.items() if key not in local} for row in rows]
    cohorts: dict[str, list[Any]] = {}
    for row in rows:
        cohorts.setdefault(row["cohort"], []).append([row["name"], row.get("local"), row.get("strides"), row.get("values")])
    return {"": short(json.dumps(alike).encode())} | {name: short(json.dumps(own).encode()) for name, own in cohorts.items()}


def _texts(tensor: torch.Tensor, first: int, last: int) -> list[str]:
    part = tensor.contiguous().view(-1)[first:last].cpu()
    try:
        return [repr(each) for each in part.tolist()]
    except (RuntimeError, NotImplementedError):  # dtypes that torch stores and cannot turn into numbers (4 bits and fewer)
        return ["?"] * (last - first)


def _difference(finding: Mapping[str, Any]) -> Difference:
    held = tuple(Held(tuple(one["ranks"]), one["text"], one["bits"]) for one in finding["held"])
    ranks, decided = verdict_of({f"{one.text} {one.bits}": one.ranks for one in held})
    return Difference(
        name=finding["name"],
        field=finding["field"],
        ranks=ranks,
        decided=decided,
        held=held,
        dtype=finding.get("dtype", ""),
        shape=tuple(finding.get("shape", ())),
        index=finding.get("index"),
        at=tuple(finding["at"]) if finding.get("at") is not None else None,
        blocks=tuple(finding.get("blocks", (0, 0))),
    )
