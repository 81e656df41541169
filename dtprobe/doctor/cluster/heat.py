"""The links as matrices for people: a value a pair, how it stands beside the others, and why it is marked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from dtprobe.doctor.cluster.matrix import Link
from dtprobe.doctor.cluster.verdict import ClusterReport
from dtprobe.report import words

STEPS = 5
"""Shades of a heat map, from 1 (best) to STEPS (worst): each is a factor of two against the best, the last all beyond."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One pair. `value` is None on the diagonal and where nothing was measured; `shade` is 0 there."""

    value: float | None
    text: str
    shade: int
    slow: str


@dataclass(frozen=True, kw_only=True)
class Row:
    rank: int
    host: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One matrix: bandwidth or latency over one transport."""

    name: str
    title: str
    unit: str
    ranks: tuple[int, ...]
    rows: tuple[Row, ...]
    summary: str


def grids(report: ClusterReport) -> list[Grid]:
    """Bandwidth (MiB/s) and latency (us) for each transport; empty where no link was measured."""
    hosts = {rank: host for host, members in report.hosts.items() for rank in members}
    found = []
    for transport in dict.fromkeys(link.transport for link in report.links):
        links = [link for link in report.links if link.transport == transport]
        found.append(_grid("bandwidth", transport, links, hosts, lambda link, out: _rate(link, out) / 2**20, "MiB/s", -1))
        found.append(_grid("latency", transport, links, hosts, lambda link, out: link.latency_s * 1e6, "us", 1))
    return found


def _rate(link: Link, out: bool) -> float:
    return link.out_bytes_s if out else link.back_bytes_s


def _grid(
    name: str,
    transport: str,
    links: list[Link],
    hosts: dict[int, str],
    value: Callable[[Link, bool], float],
    unit: str,
    worse: int,
) -> Grid:
    """`worse` is 1 where a larger value is worse, -1 where a smaller one is."""
    ranks = tuple(sorted({rank for link in links for rank in (link.a, link.b)}))
    known = {(link.a, link.b): (link, True) for link in links} | {(link.b, link.a): (link, False) for link in links}
    values = [value(*each) for each in known.values()]
    best = min(values) if worse > 0 else max(values)
    rows = []
    for a in ranks:
        cells = []
        for b in ranks:
            if (a, b) not in known:
                cells.append(Cell(value=None, text="" if a == b else "-", shade=0, slow=""))
                continue
            link, out = known[a, b]
            found = value(link, out)
            ratio = (found / best) ** worse if best > 0 and found > 0 else 1.0
            about = [why for why in link.slow if why.startswith(f"{a} to {b}:" if name == "bandwidth" else "latency")]
            shade = min(STEPS, 1 + math.floor(math.log2(max(ratio, 1.0))))
            cells.append(
                Cell(value=found, text=f"{found:,.3g}" if found < 1000 else f"{found:,.0f}", shade=shade, slow="; ".join(about))
            )
        rows.append(Row(rank=a, host=hosts.get(a, ""), cells=tuple(cells)))
    told = f"{words.number(min(values))} to {words.number(max(values))} {unit}, median {words.number(median(values))} {unit}"
    return Grid(
        name=f"{transport}-{name}", title=f"{transport} {name} ({unit})", unit=unit, ranks=ranks, rows=tuple(rows), summary=told
    )
