"""The calls that NCCL logged (`NCCL_DEBUG_SUBSYS=COLL`), compared across the ranks of each communicator.

This log is the only one that holds roots and reduce operations. It tells what the host asked for, not what completed: healthy ranks
differ by what they are ahead, so a rank that is merely behind counts little by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dtprobe.diagnose import seen
from dtprobe.diagnose.case import Case, Finding, First, Line, Quote, quote
from dtprobe.diagnose.seen.doing import Doing
from dtprobe.diagnose.seen.nccl import NcclProcess
from dtprobe.readers.nccl_log import P2P, REDUCING, ROOTED, Call

ANALYST = "nccl calls"
WINDOW = 16
"""So many calls after the first difference are looked at to tell a call left out from another call."""
BEHIND, DIFFERENT, SHIFTED, CROSSED, UNPAIRED = 0.6, 0.9, 0.85, 0.85, 0.75
LEFT_THE_LOOP = 0.85


@dataclass(frozen=True, slots=True)
class Logged:
    """A call, its communicator, and the line that tells of it."""

    call: Call
    comm: str
    line: Line

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for calls that belong together."""
        call = self.call
        return (
            call.name,
            call.count,
            call.datatype,
            call.op if call.name in REDUCING else None,
            call.root if call.name in ROOTED else None,
        )


Calls = Mapping[int, Sequence[Logged]]
"""Of each rank its calls on one communicator, in order."""


def analyse(case: Case) -> Iterator[Finding]:
    """Differences within a communicator, groups entered crosswise, sends without their receives."""
    processes = _latest(seen.of(case).nccl)
    if len(processes) < 2:
        return
    crossed = _crossed(processes)
    if crossed is not None:
        yield crossed
    for comm, calls in _communicators(processes).items():
        found = _compared(case, comm, calls)
        if found is not None and not (crossed is not None and found.mode == "collective-skipped"):
            yield found
    yield from _p2p(processes)


def _latest(processes: Sequence[NcclProcess]) -> dict[int, NcclProcess]:
    """The last process of each rank that logged calls: earlier ones are of attempts that ended."""
    return {one.rank: one for one in sorted(processes, key=lambda one: one.order) if one.rank is not None and one.calls}


def _communicators(processes: Mapping[int, NcclProcess]) -> dict[str, Calls]:
    """Calls of each communicator on which more than one rank called, or could have."""
    members: dict[str, dict[int, list[Logged]]] = {}
    for rank, process in processes.items():
        for made, _line in process.makings:
            if made.phase == "Init COMPLETE" and made.comm_id:
                members.setdefault(f"{int(made.comm_id, 16):016x}", {}).setdefault(rank, [])
        for call, comm, line in process.calls:
            if call.name not in P2P:
                members.setdefault(comm, {}).setdefault(rank, []).append(Logged(call, comm, line))
    return {comm: _together(calls) for comm, calls in members.items() if len(calls) > 1 and any(calls.values())}


def _together(calls: Calls) -> Calls:
    """The calls from the first one on that every log holds: of a log that begins later the communicator's own count tells where."""
    starts = {rank: own[0].call.op_count for rank, own in calls.items() if own}
    if len(starts) < len(calls) or len(set(starts.values())) == 1 or not all(_counts_on(own) for own in calls.values()):
        return calls
    first = max(starts.values())
    kept = {rank: [one for one in own if one.call.op_count >= first] for rank, own in calls.items()}
    return kept if all(kept.values()) else calls


def _counts_on(calls: Sequence[Logged]) -> bool:
    """Whether the count grows by at most one from call to call; calls of one launch share it."""
    return all(0 <= then.call.op_count - one.call.op_count <= 1 for one, then in pairwise(calls))


def _compared(case: Case, comm: str, calls: Calls) -> Finding | None:
    """The first position at which the ranks differ."""
    shortest = min(len(one) for one in calls.values())
    at = next((k for k in range(shortest) if len({one[k].key for one in calls.values()}) > 1), None)
    if at is None:
        return _behind(case, comm, calls, shortest)
    odd = _odd(calls, at)
    usual = next(rank for rank in calls if rank not in odd) if len(odd) < len(calls) else min(calls)
    some = min(odd - {usual}) if odd - {usual} else next(rank for rank in calls if calls[rank][at].key != calls[usual][at].key)
    return _different(case, comm, calls, at, odd, usual, some)


def _behind(case: Case, comm: str, calls: Calls, shortest: int) -> Finding | None:
    longest = max(len(one) for one in calls.values())
    if longest == shortest:
        return None
    behind = sorted(rank for rank, one in calls.items() if len(one) == shortest)
    ahead = next(rank for rank, one in calls.items() if len(one) > shortest)
    missed = calls[ahead][shortest]
    evidence = [quote(missed.line, "cause")]
    evidence += [quote(calls[rank][-1].line, "confirm") for rank in behind[:3] if calls[rank]]
    return Finding(
        mode="collective-skipped",
        analyst=ANALYST,
        likelihood=BEHIND,
        because=f"On communicator {comm}, rank {ahead} called {missed.call} (its call {shortest + 1}), which {_ranks(behind)} never did.",
        first=behind[0] if len(behind) == 1 else None,
        suspects=tuple(behind),
        evidence=tuple(evidence),
        not_proven="why it did not come: the log shows calls, not what the rank did instead",
    )


def _odd(calls: Calls, at: int) -> set[int]:
    """The ranks whose call differs from what most call, else from what the calls before let expect; all where that cannot be told."""
    by_key: dict[tuple[object, ...], list[int]] = {}
    for rank, one in calls.items():
        by_key.setdefault(one[at].key, []).append(rank)
    most = max(len(ranks) for ranks in by_key.values())
    usual = [key for key, ranks in by_key.items() if len(ranks) == most]
    if len(usual) == 1 and most > len(calls) / 2:
        return {rank for key, ranks in by_key.items() if key != usual[0] for rank in ranks}
    history = [one.key for one in next(iter(calls.values()))[:at]]
    for guess in (_expected(history), *({key} for key in [*by_key] if key in history)):
        regular = {key for key in by_key if key in guess}
        if len(regular) == 1:
            return {rank for key, ranks in by_key.items() if key not in regular for rank in ranks}
    return set(calls)


def _expected(history: Sequence[tuple[object, ...]]) -> set[tuple[object, ...]]:
    """What followed the last time on the same call as the last one."""
    for k in range(len(history) - 2, -1, -1):
        if history[k] == history[-1]:
            return {history[k + 1]}
    return set()


def _different(case: Case, comm: str, calls: Calls, at: int, odd: set[int], usual: int, some: int) -> Finding:
    mine, theirs = calls[some], calls[usual]
    mode, likelihood, why = _kind(mine[at:], theirs[at:])
    doing = seen.of(case).doing.get(some)
    if (
        len(odd) < len(calls)
        and len(mine) == at + 1
        and doing is not None
        and doing.doing in (Doing.BARRIER, Doing.DESTROY)
        and len(theirs) > at
    ):
        mode, likelihood, why = (
            "uneven-dataloader-desync",
            LEFT_THE_LOOP,
            f"it {doing.doing} while the others go on with the step",
        )
    evidence = [quote(mine[at].line, "cause"), quote(theirs[at].line, "cause")]
    if doing is not None and mode == "uneven-dataloader-desync":
        evidence.append(doing.quote("confirm"))
    first = _first(mode, calls, at, odd)
    suspects = sorted(odd if len(odd) < len(calls) and mode in ONE_SIDED else _disagreeing(calls, at, odd))
    return Finding(
        mode=mode,
        analyst=ANALYST,
        likelihood=likelihood,
        because=f"Call {at + 1} on communicator {comm}: rank {usual} {theirs[at].call}, rank {some} {mine[at].call}: {why}.",
        first=first,
        suspects=tuple(suspects),
        evidence=tuple(evidence),
        not_proven="" if len(odd) < len(calls) else "which of the ranks is right",
    )


ONE_SIDED = frozenset({"collective-skipped", "uneven-dataloader-desync", "rank-conditional-collective"})


def _disagreeing(calls: Calls, at: int, odd: set[int]) -> set[int]:
    """The odd ranks; of two that disagree both."""
    return set(calls) if len(calls) == 2 else odd


def _first(mode: str, calls: Calls, at: int, odd: set[int]) -> First:
    if len(odd) < len(calls):
        return min(odd)
    # None has called this before. Data that is missing is the likelier fault than data too many, and rank 0's code the usual path.
    if mode == "collective-shape-mismatch":
        fewest = min(one[at].call.count for one in calls.values())
        few = [rank for rank, one in calls.items() if one[at].call.count == fewest]
        if len(few) <= len(calls) / 2:
            return min(few)
    others = [rank for rank, one in calls.items() if one[at].key != calls[min(calls)][at].key]
    return min(others) if others else None


def _kind(mine: Sequence[Logged], theirs: Sequence[Logged]) -> tuple[str, float, str]:
    """The failure mode of two tails that differ in their first call."""
    own, other = [one.key for one in mine[:WINDOW]], [one.key for one in theirs[:WINDOW]]
    for k in range(1, len(other)):
        if len(own) > 1 and _agree(own, other[k:]):
            return "collective-skipped", SHIFTED, f"it left out {k} of their calls and is {k} ahead ever since"
        if len(other) > 1 and _agree(own[k:], other):
            return "rank-conditional-collective", SHIFTED, f"it called {k} more than they"
    both = min(len(own), len(other))
    for k in range(2, both + 1):
        if Counter(own[:k]) == Counter(other[:k]):
            return "collective-order-mismatch", DIFFERENT, "the same calls in another order"
    a, b = mine[0].call, theirs[0].call
    if a.name != b.name:
        return "collective-type-mismatch", DIFFERENT, "another collective"
    if a.name in ROOTED and a.root != b.root:
        return "broadcast-root-mismatch", DIFFERENT, "another root"
    if a.datatype != b.datatype:
        return "collective-dtype-mismatch", DIFFERENT, "another datatype"
    if a.count != b.count:
        return "collective-shape-mismatch", DIFFERENT, "another number of elements"
    return "reduce-op-mismatch", DIFFERENT, "another reduce operation"


def _agree(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether both go on alike for at least two calls."""
    both = min(len(one), len(other))
    return both >= 2 and list(one[:both]) == list(other[:both])


def _crossed(processes: Mapping[int, NcclProcess]) -> Finding | None:
    """Two communicators that two ranks entered in opposite orders with their last calls on them."""
    last: dict[int, dict[str, tuple[int, int, Line]]] = {}
    for rank, process in processes.items():
        counts: Counter[str] = Counter()
        for position, (call, comm, line) in enumerate(process.calls):
            if call.name not in P2P:
                counts[comm] += 1
                last.setdefault(rank, {})[comm] = position, counts[comm], line
    ranks = sorted(last)
    for i, a in enumerate(ranks):
        for b in ranks[i + 1 :]:
            shared = sorted(set(last[a]) & set(last[b]))
            for j, one in enumerate(shared):
                for two in shared[j + 1 :]:
                    if (quotes := _crosswise(last[a], last[b], one, two)) is not None:
                        return Finding(
                            mode="cross-communicator-deadlock",
                            analyst=ANALYST,
                            likelihood=CROSSED,
                            because=f"Ranks {a} and {b} entered communicators {one} and {two} in opposite orders with their last calls.",
                            first=None,
                            suspects=tuple(rank for rank in ranks if {one, two} <= set(last[rank])),
                            evidence=quotes,
                            not_proven="which of the two orders was meant",
                        )
    return None


def _crosswise(
    a: Mapping[str, tuple[int, int, Line]], b: Mapping[str, tuple[int, int, Line]], one: str, two: str
) -> tuple[Quote, ...] | None:
    ahead = a[one][1] - b[one][1], a[two][1] - b[two][1]
    orders = a[one][0] - a[two][0], b[one][0] - b[two][0]
    same = ahead == (0, 0) and orders[0] * orders[1] < 0 and max(abs(orders[0]), abs(orders[1])) == 1
    if not same and ahead[0] * ahead[1] >= 0:
        return None
    return tuple(
        quote(lines[comm][2], "cause") for lines in (a, b) for comm in sorted((one, two), key=lambda name: lines[name][0])
    )


def _p2p(processes: Mapping[int, NcclProcess]) -> Iterator[Finding]:
    """Sends that no receive met, and the reverse."""
    sends: dict[tuple[str, int, int], list[tuple[int, Line]]] = {}
    receives: dict[tuple[str, int, int], list[tuple[int, Line]]] = {}
    owners: dict[tuple[str, int], int] = {}
    for rank, process in processes.items():
        for made, _ in process.makings:
            if made.comm_id:
                owners[f"{int(made.comm_id, 16):016x}", made.rank] = rank
        own = {f"{int(made.comm_id, 16):016x}": made.rank for made, _ in process.makings if made.comm_id}
        for call, comm, line in process.calls:
            if call.name in P2P and comm in own:
                way = (comm, own[comm], call.root) if call.name == "Send" else (comm, call.root, own[comm])
                (sends if call.name == "Send" else receives).setdefault(way, []).append((rank, line))
    open_sends = {
        way: found[len(receives.get(way, ())) :] for way, found in sends.items() if len(found) > len(receives.get(way, ()))
    }
    open_receives = {
        way: found[len(sends.get(way, ())) :] for way, found in receives.items() if len(found) > len(sends.get(way, ()))
    }
    for mode, waiting, verb in (("p2p-unpaired", open_receives, "receive"), ("send-send-deadlock", open_sends, "send")):
        for (comm, source, target), found in waiting.items():
            rank, line = found[0]
            other = owners.get((comm, target if verb == "send" else source))
            if other is None:
                continue
            back = waiting.get((comm, target, source))
            evidence = [quote(line, "cause")] + ([quote(back[0][1], "cause")] if back else [])
            yield Finding(
                mode=mode if back else "p2p-unpaired",
                analyst=ANALYST,
                likelihood=UNPAIRED,
                because=f"Rank {rank} called {verb} with rank {other} on communicator {comm}, which "
                + (f"called {verb}, too." if back else "never called its counterpart."),
                first=None if back else other,
                suspects=tuple(sorted({rank, other})),
                evidence=tuple(evidence),
                not_proven="which side has the wrong order" if back else "why the counterpart was not called",
            )
            return


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
