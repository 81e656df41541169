"""What is wrong with what was measured: links, clocks and collectives as problems of the ranks they point at."""

from __future__ import annotations

from collections.abc import Sequence

from dtprobe.doctor.cluster import matrix
from dtprobe.doctor.cluster.checks import problem
from dtprobe.doctor.cluster.clocks import Offset
from dtprobe.doctor.cluster.facts import Facts
from dtprobe.doctor.cluster.matrix import Link
from dtprobe.doctor.cluster.verdict import Collective, Problem, Severity, ranks

_CLOCK_S = 0.1
_BUSY, _BEYOND_LOAD = 1.5, 10.0
"""With more than so many runnable tasks a core, a link less than so many times slower than its like says nothing about the link."""

_MOST_SINGLE, _MOST_REASONS = 8, 4


def of_links(links: Sequence[Link], facts: Sequence[Facts]) -> list[Problem]:
    """Slow links: one problem for a rank that several of them touch, one for each other link."""
    known = {each.rank: each for each in facts}
    found = []
    groups = matrix.shared(links)
    single = [slow for rank, slow in groups if rank is None]
    if len(single) > _MOST_SINGLE:
        rest = [link for slow in single[_MOST_SINGLE:] for link in slow]
        groups = [each for each in groups if each[0] is not None or each[1] in single[:_MOST_SINGLE]]
    for rank, slow in groups:
        every = [f"{link.transport} {reason}" for link in sorted(slow, key=lambda each: -each.times) for reason in link.slow]
        more = f"; and {len(every) - _MOST_REASONS} more" if len(every) > _MOST_REASONS else ""
        reasons = "; ".join(every[:_MOST_REASONS]) + more
        compare = "compare with ethtool (speed, errors) and the switch port, and iperf3 between the two hosts"
        busy = max(known[end].load for link in slow for end in (link.a, link.b))
        severity: Severity = "warning"
        if busy > _BUSY and max(link.times for link in slow) < _BEYOND_LOAD:
            severity = "note"
            compare = f"measure again on quiet hosts: {busy:.1f} tasks wanted each core, which alone explains as much"
        if rank is None:
            those = [known[slow[0].a], known[slow[0].b]]
            found.append(problem("links", severity, those, reasons, "a link like the others", compare))
        else:
            told = f"{len(slow)} slow links have rank {rank} in common: {reasons}"
            remedy = f"look at the network card, cable and load of {known[rank].host}; {compare}"
            found.append(problem("links", severity, [known[rank]], told, "links like the others", remedy))
    if len(single) > _MOST_SINGLE:
        those = [known[rank] for rank in sorted({end for link in rest for end in (link.a, link.b)})]
        told = f"{len(rest)} more slow links, with no rank in common"
        remedy = "so many differ by design or by load: compare within a rack, and on quiet hosts; --json lists them"
        found.append(problem("links", "note", those, told, "links like the others", remedy))
    return found


def of_clocks(offsets: Sequence[Offset], facts: Sequence[Facts]) -> list[Problem]:
    """Clocks that are surely more than 0.1 s off most others."""
    known = {each.rank: each for each in facts}
    if not offsets:
        return []
    middle = sorted(each.offset_s for each in offsets)[(len(offsets) - 1) // 2]
    return [
        problem(
            "clock",
            "warning",
            [known[each.rank]],
            f"its clock is {abs(each.offset_s - middle):.3g} s {'ahead of' if each.offset_s > middle else 'behind'} the others' "
            f"(+-{each.uncertainty_s * 1e3:.2g} ms)",
            f"within {_CLOCK_S:g} s: logs and traces of ranks are put in order by it, leases and certificates rest on it",
            "run chrony or systemd-timesyncd on every host; chronyc tracking shows its state",
        )
        for each in offsets
        if abs(each.offset_s - middle) - each.uncertainty_s > _CLOCK_S
    ]


def of_collectives(tried: Sequence[Collective], facts: Sequence[Facts]) -> list[Problem]:
    """Collectives whose results were wrong, by the rank that must have spoilt them."""
    wrong = [each for each in tried if each.wrong]
    if not wrong:
        return []
    culprits = {rank for each in wrong for rank in _culprits(each, len(facts))}
    told = ", ".join(dict.fromkeys(f"{each.transport} {each.op} of {each.elements} {each.dtype}" for each in wrong[:4]))
    seen = ranks({rank for each in wrong for rank in each.wrong})
    return [
        problem(
            "collectives",
            "error",
            [each for each in facts if each.rank in culprits],
            f"{len(wrong)} of {len(tried)} collectives gave wrong values ({told}), seen on {seen}",
            "the exact result on every rank",
            "do not train on it: test memory and GPU of the named ranks (memtest, dcgmi diag), rule out another torch there",
        )
    ]


def _culprits(each: Collective, size: int) -> set[int]:
    """Everyone sees what a rank contributed wrongly, but for itself where it needs no copy of its own; else who sees it received it so."""
    everyone = set(range(size))
    must_see = everyone if each.op.startswith("all_reduce") else everyone - set(each.blamed)
    return set(each.blamed) if must_see <= set(each.wrong) else set(each.wrong)
