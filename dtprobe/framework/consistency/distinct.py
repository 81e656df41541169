"""The counterpart of consistency: data that each rank must have for itself."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dtprobe.errors import UsageError
from dtprobe.framework.agreement import Said
from dtprobe.framework.consistency.digest import block_sums, short
from dtprobe.framework.consistency.entries import Entry, entries
from dtprobe.framework.consistency.meeting import meeting_of
from dtprobe.framework.consistency.report import NotDistinct, spans

_SETS = 16
"""Sets of ranks, or shared samples, that an error lists."""


def require_distinct(
    batch: Any,
    *,
    group: dist.ProcessGroup | None = None,
    by_sample: bool = False,
    timeout_s: float = 60.0,
    step: int | None = None,
) -> None:
    """Raise NotDistinct on every rank of `group` when two ranks hold the same `batch`, bit for bit.

    `batch` is anything that `check` takes; shapes may differ between ranks, and a batch without elements is like no other. With
    `by_sample` single samples are compared instead (index 0 of dim 0 of every tensor is sample 0; all tensors have the same
    length): then batches that merely overlap are found too, and so are the samples with which DistributedSampler pads
    its last batch. Raises Incomparable and MissingRanks as `check` does; `timeout_s` in seconds.
    """
    meeting = meeting_of(group)
    said = {"call": "require_distinct", "what": "samples" if by_sample else "batch", "step": step}
    with torch.no_grad(), meeting.telling(said, timeout_s):
        found = entries(batch, meeting.members)
        digests = _samples(found) if by_sample else _batch(found)
    verdict = meeting.open({**said, "digests": digests}, functools.partial(_judge, by_sample=by_sample), timeout_s)
    if verdict:
        raise NotDistinct(meeting.where, verdict["told"], verdict["same"])


def _batch(found: list[Entry]) -> list[str]:
    tensors = [one.tensor for one in found if one.tensor is not None]
    if not any(tensor.numel() for tensor in tensors):
        return []
    told = [f"{one.dtype} {one.shape} {one.text}" for one in found]
    return [short(repr(told).encode() + b"".join(sums.tobytes() for sums in block_sums(tensors)))]


def _samples(found: list[Entry]) -> list[str]:
    tensors = [one.tensor for one in found if one.tensor is not None]
    lengths = {len(tensor) if tensor.dim() else None for tensor in tensors}
    if len(lengths) != 1 or None in lengths:
        raise UsageError(
            f"the tensors of the batch have {sorted(map(str, lengths))} samples", "give tensors with the samples along dim 0"
        )
    samples = range(lengths.pop() or 0)
    sums = block_sums([tensor[sample] for sample in samples for tensor in tensors])
    each = len(tensors)
    return [short(b"".join(one.tobytes() for one in sums[sample * each : (sample + 1) * each])) for sample in samples]


def _judge(heard: Mapping[int, Said], by_sample: bool) -> Said:
    holders: dict[str, dict[int, int]] = {}
    for rank, said in sorted(heard.items()):
        for place, digest in enumerate(said["digests"]):
            holders.setdefault(digest, {}).setdefault(rank, place)
    shared = [where for where in holders.values() if len(where) > 1]
    if not shared:
        return {}
    same: dict[tuple[int, ...], list[dict[int, int]]] = {}
    for where in shared:
        same.setdefault(tuple(where), []).append(where)
    told = []
    for ranks, cases in list(same.items())[:_SETS]:
        if by_sample:
            example = ", ".join(f"{place} of rank {rank}" for rank, place in list(cases[0].items())[:4])
            told.append(
                f"{spans(ranks)} share {len(cases)} {'sample' if len(cases) == 1 else 'samples'}: {example}{' first' if len(cases) > 1 else ''}"
            )
        else:
            told.append(f"{spans(ranks)} hold the same batch")
    rest = f"; and {len(same) - _SETS} more sets of ranks" if len(same) > _SETS else ""
    return {"wrong": True, "told": "; ".join(told) + rest, "same": [list(ranks) for ranks in same]}
