"""From what was matched to findings, with the calls that show it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from dtprobe.diagnose.analysts.collectives import blame
from dtprobe.diagnose.analysts.collectives.divergence import Departure, departures
from dtprobe.diagnose.analysts.collectives.lateness import Late, late
from dtprobe.diagnose.analysts.collectives.memberships import Disagreement, disagreements
from dtprobe.diagnose.analysts.collectives.recording import Call, Recording, spans
from dtprobe.diagnose.analysts.collectives.roots import Roots, several
from dtprobe.diagnose.analysts.collectives.waits import Graph
from dtprobe.diagnose.case import Finding, Quote, Role
from dtprobe.diagnose.diagnosis import Waiting

ANALYST = "collectives"
IN_FLIGHT_S = 3.0
"""An operation that is open for less than this when the dump is taken may just be under way."""
SHOWN = 3
MOST_EDGES = 200


def findings(recording: Recording) -> Iterator[Finding]:
    """All that the dumps support, each with how likely it is by itself. Where it lists fewer waits than there are, it says so."""
    graph = Graph(recording)
    total = sum(len(graph.held[meet].awaits) for rank in graph.waiting for meet in graph.blockers[rank])
    for one in _findings(recording, graph):
        cut = 0 < len(one.waits) < total
        told = f"{one.not_proven} {len(one.waits)} of {total} waits are listed.".strip()
        yield replace(one, not_proven=told) if cut else one


def _findings(recording: Recording, graph: Graph) -> Iterator[Finding]:
    edges = tuple(islice(_edges(recording, graph), MOST_EDGES))
    found = list(departures(recording))
    hung = graph.waiting and not (graph.age_s is not None and graph.age_s < IN_FLIGHT_S)
    decided = False
    for clash in disagreements(recording):
        decided = True
        yield _disagreement(recording, graph, clash, edges)
    for roots in several(recording):
        decided = True
        yield _roots(recording, roots, edges)
    for departure in found:
        decided = decided or not departure.silent
        yield _departure(recording, departure, edges)
    if hung and not decided:
        for one in blame.blamed(graph):
            yield _blamed(recording, one, edges)
    if not graph.waiting or not hung:
        slow = late(recording) if not found else None
        if slow is not None:
            yield _late(recording, slow)
        elif not found and not decided and not recording.absent and not recording.unread:
            yield _healthy(recording, graph)


def _healthy(recording: Recording, graph: Graph) -> Finding:
    still = "" if not graph.waiting else "; the last calls were under way when the dumps were taken"
    return Finding(
        mode="healthy",
        analyst=ANALYST,
        likelihood=0.5,
        because=f"every call of all {len(recording.ranks)} ranks met its counterparts and none hangs{still}",
        not_proven="Roots and reduce operations are not recorded, nor what happened outside collectives.",
    )


def quote(recording: Recording, call: Call, role: Role, before: str = "") -> Quote:
    """A call as evidence; a dump has no lines."""
    return Quote(
        file=recording.ranks[call.rank].name,
        line=None,
        text=f"rank {call.rank}: {before}{recording.words(call)}",
        role=role,
    )


def _edges(recording: Recording, graph: Graph) -> Iterator[Waiting]:
    for rank in graph.waiting:
        for other, meet, _ in islice(graph.awaited(rank), SHOWN):
            call = graph.held[meet].calls[rank]
            yield Waiting(
                rank=rank,
                awaits=other,
                operation=recording.words(call, state=False).partition(" of ")[0],
                group=recording.described(rank, call.lane.group),
            )


def _disagreement(recording: Recording, graph: Graph, clash: Disagreement, edges: tuple[Waiting, ...]) -> Finding:
    evidence = [
        Quote(
            file=recording.ranks[ranks[0]].name,
            line=None,
            text=f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}: group {clash.name} has the members {spans(members)}",
            role="cause",
        )
        for members, ranks in list(clash.views.items())[: SHOWN + 1]
    ]
    for without in clash.without[:SHOWN]:
        evidence.append(
            Quote(
                file=recording.ranks[without].name,
                line=None,
                text=f"rank {without}: its dump lists no group {clash.name}",
                role="cause",
            )
        )
    stuck = [call for rank in graph.waiting for call in graph.open[rank][:1] if call.lane.group == clash.name]
    evidence += [quote(recording, call, "effect") for call in stuck[:SHOWN]]
    one = clash.without[0] if len(clash.without) == 1 else None
    return Finding(
        mode="new-group-misuse",
        analyst=ANALYST,
        likelihood=0.85,
        because=(
            f"the ranks hold {len(clash.views)} different views of who belongs to group {clash.name}"
            if len(clash.views) > 1
            else f"rank {spans(clash.without)} belongs to group {clash.name} by the others' lists, and has no such group"
        ),
        first=one,
        suspects=clash.without,
        evidence=tuple(evidence),
        not_proven="Which of the member lists was meant.",
        waits=edges,
    )


def _roots(recording: Recording, roots: Roots, edges: tuple[Waiting, ...]) -> Finding:
    ranks = tuple(call.rank for call in roots.calls)
    op = recording.kind(roots.calls[0]).op
    return Finding(
        mode="broadcast-root-mismatch",
        analyst=ANALYST,
        likelihood=0.85,
        because=f"ranks {spans(ranks)} each act as the root of {op} seq {roots.seq}: they alone bring the root's tensors",
        suspects=ranks,
        evidence=tuple(quote(recording, call, "cause", "acts as the root of ") for call in roots.calls[: SHOWN + 1]),
        not_proven="Which of them was meant to be the root: it is not recorded.",
        at_ns=min(recording.created(call) for call in roots.calls),
        waits=edges,
    )


_TOLD = {
    "collective-skipped": "left out {count} call{s} and came with what follows",
    "rank-conditional-collective": "made {count} call{s} that the others did not make",
    "collective-order-mismatch": "made the same {count} calls in another order",
    "uneven-dataloader-desync": "had left the loop and came to a barrier",
    "collective-type-mismatch": "called another operation",
    "collective-dtype-mismatch": "brought another dtype",
    "collective-shape-mismatch": "brought another number of elements",
}


def _departure(recording: Recording, one: Departure, edges: tuple[Waiting, ...]) -> Finding:
    what = _TOLD[one.mode].format(count=one.count, s="s" * (one.count > 1))
    where = f"{recording.words(one.expected, state=False).partition(';')[0]}"
    who = f"rank{'s' * (len(one.ranks) > 1)} {spans(one.ranks)}"
    evidence = [quote(recording, one.theirs, "cause", "called "), quote(recording, one.expected, "confirm", "called ")]
    for rank in one.others:
        if rank != one.expected.rank and len(evidence) < SHOWN:
            place = recording.ranks[rank].columns[one.expected.lane].at(one.seq)
            if place is not None:
                evidence.append(quote(recording, Call(rank, one.expected.lane, place), "confirm", "called "))
    tied = tuple(sorted({*one.ranks, *one.others}))
    return Finding(
        mode=one.mode,
        analyst=ANALYST,
        likelihood=(0.7 if one.silent else 0.9) - 0.1 * one.tie,
        because=f"where the others called {where}, {who} {what}"
        if not one.tie
        else f"ranks {spans(one.others)} and {spans(one.ranks)} differ at {where}; neither is the odd one",
        first=None if one.tie else one.ranks[0],
        suspects=tied if one.tie else one.ranks,
        host=recording.hosts.get(one.ranks[0]),
        at_ns=one.at_ns,
        evidence=tuple(evidence),
        not_proven="Both calls completed all the same: the result is wrong without an error." if one.silent else "",
        waits=edges,
    )


def _blamed(recording: Recording, one: blame.Blamed, edges: tuple[Waiting, ...]) -> Finding:
    evidence = [quote(recording, call, "cause", before) for call, before in one.causes[: SHOWN + 1]]
    evidence += [quote(recording, call, "effect", "waits in ") for call in one.effects[:SHOWN]]
    first = one.first
    return Finding(
        mode=one.mode,
        analyst=ANALYST,
        likelihood=one.likelihood,
        because=one.because,
        first=first,
        suspects=one.suspects,
        host=recording.hosts.get(first) if isinstance(first, int) else None,
        at_ns=min((recording.created(call) for call in one.effects), default=None),
        evidence=tuple(evidence),
        not_proven=one.not_proven,
        waits=edges,
    )


def _late(recording: Recording, one: Late) -> Finding:
    how = "by how long each rank was in the call" if one.timed else "by the time from call to call on each rank's own clock"
    evidence: Sequence[Quote] = [quote(recording, call, "cause", f"{ms:.1f} ms late to ") for call, ms in one.shown]
    return Finding(
        mode="straggler",
        analyst=ANALYST,
        likelihood=0.75,
        because=f"rank{'s' * (len(one.ranks) > 1)} {spans(one.ranks)} came late to {one.count} of {one.calls} calls of a kind in group "
        f"{one.group.name}: the others waited {one.waited_ms:.0f} of {one.span_ms:.0f} ms ({how})",
        first=one.ranks[0],
        suspects=one.ranks,
        host=recording.hosts.get(one.ranks[0]),
        evidence=tuple(evidence),
        not_proven="Why it is late: its own work, its input or its device.",
    )
