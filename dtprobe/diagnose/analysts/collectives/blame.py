"""Whom the graph of waits blames: a cycle, the ranks at the end of the chains, those that nobody knows of, or all alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtprobe.diagnose.analysts.collectives.habits import Break, broken
from dtprobe.diagnose.analysts.collectives.recording import Call, Recording, spans
from dtprobe.diagnose.analysts.collectives.waits import Graph, Meet, Reason
from dtprobe.diagnose.case import First
from dtprobe.readers.flight_columns import STARTED, Lane

MOST_ASKED = 64
"""So many ranks and calls of a cycle are looked into."""
_HABITS = {
    "left-out": "collective-skipped",
    "added": "rank-conditional-collective",
    "exchanged": "cross-communicator-deadlock",
    "replaced": "collective-skipped",
}
_DID = {
    "left-out": "left out {count} calls and went on to",
    "added": "made {count} calls more, beginning with",
    "exchanged": "made {count} calls in another order, beginning with",
    "replaced": "came with",
}
ALIKE = "An absent rank, a stopped one and one whose interpreter lock is held look alike in a flight recorder."


@dataclass(frozen=True, kw_only=True)
class Blamed:
    """A mode with the calls that show it: `causes` with a word before each, `effects` where others wait."""

    mode: str
    first: First
    suspects: tuple[int, ...]
    likelihood: float
    because: str
    causes: tuple[tuple[Call, str], ...] = ()
    effects: tuple[Call, ...] = ()
    not_proven: str = ""


def blamed(graph: Graph) -> Iterator[Blamed]:
    """The first of these that there is: cycles, idle ranks that others wait for, ranks that left nothing, a call that all are in."""
    cycles = graph.cycles()
    if cycles:
        yield _cycle(graph, min(cycles, key=lambda ranks: _since(graph, ranks)))
        return
    if idle := graph.idle():
        yield _idle(graph, idle)
        return
    blind = graph.blind()
    if blind:
        yield from _gone(graph, blind)
        return
    if (half := _halfway(graph)) is not None:
        yield half
        return
    entered = graph.entered()
    if not entered:
        return
    started = all(graph.recording.state(call) == STARTED for call in graph.held[entered[0]].calls.values())
    # where others wait for a rank that is in such a call, that is why it came no further
    waited = any(held.awaits for held in graph.held.values())
    if not started and not waited and (short := graph.short()):
        yield _short(graph, *short[0])
    elif late := _latecomers(graph, entered[0]):
        yield _late(graph, entered[0], late)
    else:
        yield _symmetric(graph, entered[0])


def _short(graph: Graph, call: Call, ranks: tuple[int, ...]) -> Blamed:
    recording = graph.recording
    who = f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}"
    return Blamed(
        mode="collective-skipped",
        first=ranks[0] if len(ranks) == 1 else None,
        suspects=ranks,
        likelihood=0.6,
        because=f"{who} never called {_named(recording, call)}, as the others did; no call before it has started anywhere",
        causes=tuple((last, "last call: ") for rank in ranks[:3] for last in _last_calls(recording, rank)),
        effects=(call,),
        not_proven=ALIKE,
    )


def _since(graph: Graph, ranks: Sequence[int]) -> int:
    return min(graph.recording.created(graph.open[rank][0]) for rank in ranks)


def _idle(graph: Graph, idle: dict[int, list[tuple[Meet, Reason]]]) -> Blamed:
    recording = graph.recording
    # who is furthest behind stopped first
    ranks = sorted(
        idle, key=lambda rank: (min(_made(graph, meet) for meet, _ in idle[rank]), recording.ranks[rank].last_ns, rank)
    )
    chief = ranks[0]
    meet, _ = min(idle[chief], key=lambda one: _made(graph, one[0]))
    # of several that miss from one call none is the first
    equal = [rank for rank in ranks if min(_made(graph, each) for each, _ in idle[rank]) == _made(graph, meet)]
    effects = _waiters(graph, meet)
    p2p = all(one.lane is not None for rank in ranks for one, _ in idle[rank])
    who = f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}"
    return Blamed(
        mode="rank-stopped" if p2p else "collective-skipped",
        first=chief if len(equal) == 1 else None,
        suspects=(chief, *sorted(ranks[1:])),
        likelihood=0.65,
        because=f"{who} never entered {_named(recording, effects[0])}, in which others wait, and waits in no call itself",
        causes=tuple((call, "last call: ") for rank in ranks[:3] for call in _last_calls(recording, rank)),
        effects=effects,
        not_proven=ALIKE,
    )


def _gone(graph: Graph, blind: Sequence[Meet]) -> Iterator[Blamed]:
    recording = graph.recording
    first = min(blind, key=lambda meet: _made(graph, meet))
    unknown = {rank for meet in blind for rank in graph.held[meet].unknown}
    lost = sorted(unknown & set(recording.absent))
    if not lost:
        return
    few = len(lost) * 4 <= max(4, recording.world_size)
    effects = _waiters(graph, first)
    yield Blamed(
        mode="rank-lost",
        first=lost[0] if len(lost) == 1 else None,
        suspects=tuple(lost),
        likelihood=(0.7 if few else 0.55) if len(lost) * 2 <= recording.world_size else 0.3,
        because=f"all ranks that left a dump have entered {_named(recording, effects[0])}; rank{'s' * (len(lost) > 1)} "
        f"{spans(lost)} left none",
        effects=effects,
        not_proven="How it ended: its dump is missing. A dump that was only not collected looks the same.",
    )


def _halfway(graph: Graph) -> Blamed | None:
    """A broadcast that some of its members have left while others wait in it, who called it as well."""
    recording = graph.recording
    for meet, held in graph.held.items():
        if meet.lane is not None or held.awaits or held.unknown or recording.kind(_waiters(graph, meet)[0]).op != "broadcast":
            continue
        left = [rank for rank in meet.group.members if rank not in held.calls]
        if not left:
            continue
        done = [Call(rank, lane, place) for rank in left[:2] for lane, place in _place(recording, rank, meet)]
        return Blamed(
            mode="broadcast-root-mismatch",
            first=None,
            suspects=meet.group.members,
            likelihood=0.65,
            because=f"rank {spans(left)} has left {_named(recording, _waiters(graph, meet)[0])} and rank {spans(sorted(held.calls))} has not: a "
            "root sends and goes on, so the ranks may hold different ones for it",
            causes=tuple((call, "left ") for call in done),
            effects=_waiters(graph, meet),
            not_proven="Roots are not recorded. A link that lost what the root sent looks the same.",
        )
    return None


def _place(recording: Recording, rank: int, meet: Meet) -> list[tuple[Lane, int]]:
    lane = Lane(meet.group.name)
    column = recording.ranks[rank].columns.get(lane) if rank in recording.ranks else None
    place = column.at(meet.seq) if column is not None else None
    return [(lane, place)] if place is not None else []


def _latecomers(graph: Graph, meet: Meet) -> dict[int, float]:
    """Ranks that came to this call when the first had waited for longer than the group's time-out, and by how many seconds; a half at most."""
    recording = graph.recording
    came = {rank: recording.created(call) for rank, call in graph.held[meet].calls.items()}
    first = min(came, key=lambda rank: came[rank])
    limit_ms = recording.ranks[first].limits.get(meet.group.name)
    if not limit_ms:
        return {}
    late = {rank: (at - came[first]) / 1e9 for rank, at in came.items() if at - came[first] > limit_ms * 1e6}
    return late if len(late) * 2 <= len(came) else {}


def _late(graph: Graph, meet: Meet, late: dict[int, float]) -> Blamed:
    calls = graph.held[meet].calls
    ranks = sorted(late)
    waited = [call for rank, call in calls.items() if rank not in late]
    return Blamed(
        mode="collective-skipped",
        first=ranks[0] if len(ranks) == 1 else None,
        suspects=tuple(ranks),
        likelihood=0.7,
        because=f"rank{'s' * (len(ranks) > 1)} {spans(ranks)} came to {_named(graph.recording, waited[0])} {min(late.values()):.0f} s after the "
        "others, which had given up by then",
        causes=tuple((calls[rank], "came late to ") for rank in ranks[:3]),
        effects=tuple(waited[:3]),
        not_proven=ALIKE,
    )


def _symmetric(graph: Graph, meet: Meet) -> Blamed:
    recording = graph.recording
    members = meet.group.members
    everyone = len(members) >= recording.world_size
    effects = _waiters(graph, meet)
    return Blamed(
        mode="symmetric-hang",
        first="all" if everyone else None,
        suspects=() if everyone else members,
        likelihood=0.7,
        because=f"all {len(members)} members have entered {_named(recording, effects[0])} and none has left it",
        effects=effects,
        not_proven="What holds it: the network, a device or the library; no rank differs from the others.",
    )


def _cycle(graph: Graph, ranks: Sequence[int]) -> Blamed:
    members = set(ranks)
    meets = [
        meet for meet, held in graph.held.items() if not members.isdisjoint(held.calls) and not members.isdisjoint(held.awaits)
    ]
    pairs = [meet for meet in meets if meet.lane is not None]
    wrong = [meet for meet in pairs if "differs" in graph.held[meet].awaits.values()]
    if wrong:
        return _sizes(graph, wrong[0])
    breaks = _breaks(graph, ranks)
    if breaks:
        return _broken(graph, ranks, meets, breaks)
    return _pairs(graph, ranks, meets, pairs) if pairs else _crossed(graph, ranks, meets)


def _breaks(graph: Graph, ranks: Sequence[int]) -> list[Break]:
    """The few of the ranks that did not do what they did before; none where most did not, or no history tells."""
    if len(ranks) > MOST_ASKED:
        # in a large cycle nearly all are victims that wait in the same call
        held = [graph.held[meet] for meet in {meet for rank in ranks for meet in graph.blockers[rank]}]
        ranks = sorted({rank for one in held for rank in (*one.awaits, *list(one.calls)[:1]) if graph.open.get(rank)})[
            :MOST_ASKED
        ]
    awaited = {(rank, meet.lane or Lane(meet.group.name)) for meet, held in graph.held.items() for rank in held.awaits}
    asked = (broken(graph.recording, graph.meeting, graph.open[rank][0]) for rank in ranks)
    found = [one for one in asked if one is not None]
    # what was due should be what others wait for: a rank may depart from its habits for other reasons
    sure = [one for one in found if (one.rank, one.due) in awaited]
    some = sure or (found if len(found) == 1 else [])
    return some if len(some) * 2 <= len(ranks) else []


def _broken(graph: Graph, ranks: Sequence[int], meets: Sequence[Meet], breaks: Sequence[Break]) -> Blamed:
    recording = graph.recording
    first = breaks[0]
    guilty = tuple(one.rank for one in breaks)
    missed = [meet for meet in meets if any(graph.held[meet].awaits.get(rank) == "absent" for rank in guilty)]
    effects = tuple(call for meet in (missed or meets)[:2] for call in _waiters(graph, meet) if call.rank not in guilty)
    # which half of the job waits for it tells more than what was due
    absent = [meet.lane is not None for meet in missed]
    pair = all(absent) if absent and len(set(absent)) == 1 else any(lane.p2p for lane in (first.due, *first.lanes))
    held = [recording.kind(call).op for meet in meets for call in graph.held[meet].calls.values()]
    both = set(held) == {"send"} and first.how != "left-out"
    mode = "send-send-deadlock" if both else "p2p-unpaired" if pair else _HABITS[first.how]
    went = f"rank {spans(guilty)} {_DID[first.how].format(count=first.count)} {_named(recording, first.call)}, unlike the times before"
    return Blamed(
        mode=mode,
        first=guilty[0],
        suspects=guilty,
        likelihood=0.85,
        because=f"ranks {spans(ranks)} wait for each other; {went}",
        causes=tuple((one.call, "went on to ") for one in breaks[:3]),
        effects=effects[:4],
        not_proven="That the calls of earlier steps were to come again is taken from the recorded history.",
    )


def _pairs(graph: Graph, ranks: Sequence[int], meets: Sequence[Meet], pairs: Sequence[Meet]) -> Blamed:
    """Point-to-point calls in the cycle: one side is missing, or all wait for each other with the same half first."""
    recording = graph.recording
    calls = [graph.held[meet].calls[meet.rank] for meet in pairs]
    ops = {recording.kind(call).op for call in calls}
    unpaired = {rank: meet for meet in pairs for rank, why in graph.held[meet].awaits.items() if why == "absent"}
    if len(pairs) == len(meets) and (not unpaired or set(unpaired) >= set(ranks)):
        both = "send" if ops == {"send"} else "receive"
        return Blamed(
            mode="send-send-deadlock" if ops == {"send"} else "p2p-unpaired",
            first=None,
            suspects=tuple(ranks),
            likelihood=0.85,
            because=f"ranks {spans(ranks)} {both} first, each from the other's side: nobody does the other half",
            causes=tuple((call, "waits in ") for call in calls[:4]),
        )
    suspects = sorted(unpaired) or list(ranks)
    meet = unpaired[suspects[0]] if unpaired else pairs[0]
    return Blamed(
        mode="p2p-unpaired",
        first=suspects[0] if len(suspects) == 1 else None,
        suspects=tuple(suspects),
        likelihood=0.85,
        because=f"rank {meet.rank} waits in {_named(recording, graph.held[meet].calls[meet.rank])}; "
        f"rank {spans(suspects)} never made its half and waits elsewhere",
        causes=tuple((call, "waits in ") for call in calls[:3]),
        effects=tuple(call for rank in suspects[:2] for call in graph.open[rank][:1]),
        not_proven="Whether the half that is missing was left out, or the other one was one too many.",
    )


def _sizes(graph: Graph, meet: Meet) -> Blamed:
    recording = graph.recording
    mine = graph.held[meet].calls[meet.rank]
    theirs = graph.counterpart(meet)
    both = [mine] if theirs is None else [mine, theirs]
    odd = [call.rank for call in both if _unusual(recording, call)]
    return Blamed(
        mode="collective-shape-mismatch",
        first=odd[0] if len(odd) == 1 else None,
        suspects=tuple(odd) if len(odd) == 1 else tuple(sorted(call.rank for call in both)),
        likelihood=0.85,
        because=f"the two sides of {_named(recording, mine)} differ in size",
        causes=tuple((call, "waits in ") for call in both),
    )


def _unusual(recording: Recording, call: Call) -> bool:
    column = recording.column(call)
    return bool(call.place) and column.kind[call.place] not in column.kind[: call.place]


def _crossed(graph: Graph, ranks: Sequence[int], meets: Sequence[Meet]) -> Blamed:
    """Only collectives, and no history tells: groups were entered in opposite orders."""
    causes = tuple((call, "waits in ") for meet in meets for call in list(graph.held[meet].calls.values())[:2])
    flipped = _flipped(graph, meets)
    if flipped is None:
        flipped = _smaller_side(graph, ranks, meets)
    few = flipped and len(flipped) < len(ranks)
    return Blamed(
        mode="cross-communicator-deadlock",
        first=flipped[0] if few else None,
        suspects=tuple(flipped or ranks),
        likelihood=0.9,
        because=f"ranks {spans(ranks)} wait for each other in calls of {len({meet.group for meet in meets})} groups"
        + (f"; rank {spans(flipped)} entered them in the opposite order" if few else ": each entered them in another order"),
        causes=causes[:6],
    )


def _flipped(graph: Graph, meets: Sequence[Meet]) -> list[int] | None:
    """Ranks that made two of these calls in the order that fewer have; none where as many have either; None where no two ranks
    that made both differ."""
    found: list[int] = []
    decided = False
    for at, one in enumerate(meets[:MOST_ASKED]):
        for other in meets[at + 1 : MOST_ASKED]:
            before, after = _orders(graph, one, other)
            if before and after:
                decided = True
                if len(before) != len(after):
                    found += before if len(before) < len(after) else after
    return sorted(set(found)) if decided else None


def _orders(graph: Graph, one: Meet, other: Meet) -> tuple[list[int], list[int]]:
    before: list[int] = []
    after: list[int] = []
    for rank in set(one.group.members) & set(other.group.members) & set(graph.recording.ranks):
        calls = graph.recording.ranks[rank]
        mine, yours = (calls.columns.get(Lane(meet.group.name)) for meet in (one, other))
        if mine is None or yours is None:
            continue
        place, place_of_other = mine.at(one.seq), yours.at(other.seq)
        if place is not None and place_of_other is not None:
            (before if mine.order[place] < yours.order[place_of_other] else after).append(rank)
    return before, after


def _smaller_side(graph: Graph, ranks: Sequence[int], meets: Sequence[Meet]) -> list[int]:
    """Where two calls hold each other up: the ranks in that which fewer are in; none where as many are in either."""
    if len(meets) != 2:
        return []
    sides = sorted((sorted(set(graph.held[meet].calls)) for meet in meets), key=len)
    return [rank for rank in sides[0] if rank in ranks] if len(sides[0]) < len(sides[1]) else []


def _made(graph: Graph, meet: Meet) -> int:
    return min(graph.recording.created(call) for call in graph.held[meet].calls.values())


def _waiters(graph: Graph, meet: Meet) -> tuple[Call, ...]:
    return tuple(list(graph.held[meet].calls.values())[:3])


def _last_calls(recording: Recording, rank: int) -> list[Call]:
    """The rank's newest call, if its dump holds any."""
    ends = [
        (column.order[-1], Call(rank, lane, len(column) - 1))
        for lane, column in recording.ranks[rank].columns.items()
        if len(column)
    ]
    return [max(ends)[1]] if ends else []


def _named(recording: Recording, call: Call) -> str:
    return recording.words(call, state=False).partition(";")[0]
