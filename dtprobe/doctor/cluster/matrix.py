"""The links between ranks: which pairs meet when, and which of the measured links are slow beside their like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

MOST = 32
"""Beyond so many ranks one rank a host measures: n ranks have n(n-1)/2 links."""

_FACTOR = {"between hosts": 2.0, "same host": 3.0}
"""So many times worse than its like is slow. Within a host the scheduler's noise is larger than any defect of the path."""
_LATENCY_FACTOR = 3.0
_LATENCY_SLACK_S = {"between hosts": 200e-6, "same host": 3e-3}
"""And by so much. Within a host a rank that waits for a processor for one slice of the scheduler's is late by milliseconds."""
_FEW = 3


@dataclass(frozen=True, kw_only=True)
class Link:
    """One pair of ranks, `a` < `b`, measured over one transport (gloo or nccl).

    Seconds and bytes a second: `latency_s` is half the median round trip of a 32-byte message, `out_bytes_s` from a to b,
    `back_bytes_s` from b to a, by the median of `repeats` messages of `size` bytes. `offset_s` is b's clock minus a's, within
    `uncertainty_s` (None over nccl).
    """

    transport: str
    a: int
    b: int
    kind: str
    latency_s: float
    out_bytes_s: float
    back_bytes_s: float
    size: int
    repeats: int
    offset_s: float | None
    uncertainty_s: float | None
    slow: tuple[str, ...] = ()
    """Why the link is marked, empty where it is not."""
    times: float = 1.0
    """How many times worse than its like it is, by its worst figure; judged only where it is marked."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"slow": list(self.slow)}

    def better_of(self, other: Link) -> Link:
        """This link with the better figures of two measurements: noise only ever makes a link look worse."""
        closer = min((self, other), key=lambda each: each.uncertainty_s if each.uncertainty_s is not None else 1e9)
        return replace(
            self,
            latency_s=min(self.latency_s, other.latency_s),
            out_bytes_s=max(self.out_bytes_s, other.out_bytes_s),
            back_bytes_s=max(self.back_bytes_s, other.back_bytes_s),
            offset_s=closer.offset_s,
            uncertainty_s=closer.uncertainty_s,
        )


def rounds(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """A round-robin tournament (the circle method): each pair meets once, and in one round no rank is in two pairs.

    n-1 rounds for an even number of ranks, n for an odd one. Pairs are (lower, higher).
    """
    circle: list[int | None] = [*ranks]
    if len(circle) % 2:
        circle.append(None)
    half = len(circle) // 2
    found = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle.insert(1, circle.pop())
    return found


def measuring(hosts: Sequence[str], most: int = MOST) -> tuple[list[int], str]:
    """The ranks that measure links, given each rank's host, and what is left out (empty: nothing)."""
    if len(hosts) <= most:
        return list(range(len(hosts))), ""
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    return sorted(
        first.values()
    ), f"{len(hosts)} ranks are more than {most}: one rank a host was measured ({len(first)} of them)"


def judged(links: Iterable[Link]) -> list[Link]:
    """The links, with the reason on each that is slow beside the others of its kind and transport.

    The measure is the median; among three links or fewer the best, since one slow host slows two of three. A single link is
    compared with itself in the other direction.
    """
    groups: dict[tuple[str, str], list[Link]] = {}
    for link in links:
        groups.setdefault((link.transport, link.kind), []).append(link)
    return sorted(
        (each for (_, kind), group in groups.items() for each in _judged(kind, group)),
        key=lambda each: (each.transport, each.a, each.b),
    )


def _judged(kind: str, group: Sequence[Link]) -> list[Link]:
    few = len(group) <= _FEW
    rates = [rate for link in group for rate in (link.out_bytes_s, link.back_bytes_s)]
    rate = max(rates) if few else median(rates)
    latencies = [link.latency_s for link in group]
    latency = min(latencies) if few else median(latencies)
    base = f"the best of {len(group)}" if few else f"the median of {len(group)}"
    like = f"{base} link{'s' if len(group) > 1 else ''} {'on the same host' if kind == 'same host' else kind}"
    found = []
    for link in group:
        why, times = [], 1.0
        for start, end, value in ((link.a, link.b, link.out_bytes_s), (link.b, link.a, link.back_bytes_s)):
            if value * _FACTOR[kind] < rate:
                times = max(times, rate / value)
                why.append(f"{start} to {end}: {_mib(value)}, {rate / value:.1f} times below {like} ({_mib(rate)})")
        if link.latency_s > max(_LATENCY_FACTOR * latency, latency + _LATENCY_SLACK_S[kind]):
            ratio = link.latency_s / latency
            times = max(times, ratio)
            why.append(f"latency {_us(link.latency_s)}, {ratio:.1f} times above {like} ({_us(latency)})")
        found.append(replace(link, slow=tuple(why), times=times))
    return found


def shared(links: Iterable[Link]) -> list[tuple[int | None, list[Link]]]:
    """The slow links by the rank they have in common: a host's bad card slows all of its links. None: a link by itself.

    The rank that most slow links touch comes first, if they are at least two and most of those that it has.
    """
    every = list(links)
    slow = [link for link in every if link.slow]
    found: list[tuple[int | None, list[Link]]] = []
    while slow:
        touched = Counter(rank for link in slow for rank in (link.a, link.b))
        rank, count = max(touched.items(), key=lambda each: (each[1], -each[0]))
        mine = [link for link in slow if rank in (link.a, link.b)]
        if count < 2 or 2 * count <= sum(rank in (link.a, link.b) and link.transport == mine[0].transport for link in every):
            found += [(None, [link]) for link in slow]
            break
        found.append((rank, mine))
        slow = [link for link in slow if link not in mine]
    return found


def merged(first: Iterable[Link], again: Iterable[Link]) -> list[Link]:
    """The first measurement, improved by a second one of some of its links."""
    better: Mapping[tuple[str, int, int], Link] = {(each.transport, each.a, each.b): each for each in again}
    return [link.better_of(better[key]) if (key := (link.transport, link.a, link.b)) in better else link for link in first]


def _mib(value: float) -> str:
    return f"{value / 2**20:,.3g} MiB/s" if value < 1000 * 2**20 else f"{value / 2**20:,.0f} MiB/s"


def _us(value: float) -> str:
    return f"{value * 1e6:,.0f} us"
