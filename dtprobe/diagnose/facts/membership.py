"""Which ranks belong to a process group that time-outs name: those who spoke of it, and those whom its own numbers imply."""

from __future__ import annotations

from collections.abc import Sequence

from dtprobe.diagnose.facts.timeouts import Timeout, Waits

SPREADING = frozenset({"ALLGATHER", "ALLGATHER_BASE", "REDUCE_SCATTER", "REDUCE_SCATTER_BASE"})
"""Operations whose larger side holds one part of every member."""


def members(joined: Waits, group: str, everybody: frozenset[int]) -> frozenset[int]:
    """The members of a named group as far as anything tells them.

    Ranks within the group beside global ranks show how its members follow each other; sizes of gathers and scatters how many they
    are. Where neither says more, a group that most of the job waits in is taken as one of the whole job.
    """
    told = {(one.inner, one.rank) for one in joined.statuses if one.group == group}
    told |= {(one.inner, one.rank) for one in joined.timeouts if one.group == group}
    heard = frozenset(rank for _, rank in told)
    pairs = sorted({(inner, rank) for inner, rank in told if inner is not None})
    count = _count([one for one in joined.timeouts if one.group == group])
    elsewhere = {one.rank for one in joined.timeouts} - heard
    implied = _implied(pairs, count, everybody) - elsewhere
    silent = implied - heard
    return heard | silent if 2 * len(silent) < len(heard | silent) else heard


def _implied(pairs: Sequence[tuple[int, int]], count: int | None, everybody: frozenset[int]) -> frozenset[int]:
    """The members by a first rank and a stride between them, where the pairs fit one; else the job where they number as many."""
    whole = everybody if count in (None, len(everybody)) else frozenset[int]()
    if len(pairs) < 2:
        return whole
    (inner, rank), (last_inner, last_rank) = pairs[0], pairs[-1]
    stride, rest = divmod(last_rank - rank, last_inner - inner) if last_inner > inner else (0, 1)
    if rest or stride < 1 or any(one != rank + stride * (number - inner) for number, one in pairs):
        return frozenset()
    start = rank - stride * inner
    if count is None and (start, stride) == (0, 1):
        return everybody
    return frozenset(start + stride * number for number in range(max(count or 0, last_inner + 1)))


def _count(timeouts: Sequence[Timeout]) -> int | None:
    """How many members a gather or scatter of these sizes has, where all of them agree."""
    counts = {
        max(one.numel_in, one.numel_out) // min(one.numel_in, one.numel_out)
        for one in timeouts
        if one.op in SPREADING
        and one.numel_in
        and one.numel_out
        and max(one.numel_in, one.numel_out) % min(one.numel_in, one.numel_out) == 0
    }
    return counts.pop() if len(counts) == 1 else None
