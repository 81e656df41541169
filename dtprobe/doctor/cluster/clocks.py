"""How far apart the clocks of ranks are, from messages that each side stamped.

For a message stamped t0 by a when sent, t1 by b when it came, t2 when answered and t3 by a when that came, b's clock is ahead
by ((t1 - t0) + (t2 - t3)) / 2, and off that by at most half the round trip (t3 - t0) - (t2 - t1): NTP's own rule (RFC 5905,
section 8). The exchange with the shortest round trip says most.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Stamps = tuple[int, int, int, int]
"""t0, t1, t2, t3 in nanoseconds: t0 and t3 by a's clock, t1 and t2 by b's."""


@dataclass(frozen=True, kw_only=True)
class Offset:
    """The clock of `rank` is ahead of `of`'s by `offset_s`, give or take `uncertainty_s` (seconds)."""

    rank: int
    of: int
    offset_s: float
    uncertainty_s: float


def between(exchanges: Iterable[Stamps]) -> tuple[float, float]:
    """Offset of b's clock against a's and its uncertainty, in seconds, from the exchange with the shortest round trip."""
    trip, offset = min(((t3 - t0) - (t2 - t1), (t1 - t0) + (t2 - t3)) for t0, t1, t2, t3 in exchanges)
    return offset / 2e9, max(trip, 0) / 2e9


def from_first(pairs: Sequence[Offset]) -> list[Offset]:
    """Each rank's offset from the lowest rank, along the path on which the uncertainties add up to least.

    `pairs` are measured offsets (`rank` against `of`). Ranks that no path reaches are left out.
    """
    near: dict[int, list[tuple[int, float, float]]] = {}
    for pair in pairs:
        near.setdefault(pair.of, []).append((pair.rank, pair.offset_s, pair.uncertainty_s))
        near.setdefault(pair.rank, []).append((pair.of, -pair.offset_s, pair.uncertainty_s))
    if not near:
        return []
    first = min(near)
    found: dict[int, Offset] = {}
    queue = [(0.0, first, 0.0)]
    while queue:
        uncertainty_s, rank, offset_s = heapq.heappop(queue)
        if rank in found:
            continue
        found[rank] = Offset(rank=rank, of=first, offset_s=offset_s, uncertainty_s=uncertainty_s)
        for other, more_s, doubt_s in near[rank]:
            if other not in found:
                heapq.heappush(queue, (uncertainty_s + doubt_s, other, offset_s + more_s))
    return [found[rank] for rank in sorted(found)]
