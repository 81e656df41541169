"""What torchrun's agent tells of its workers in the end: whom it lists as failed, and whom it had to end, who thus ran still."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from dtprobe.diagnose.case import Case, Line
from dtprobe.diagnose.facts.ends import End, ends
from dtprobe.diagnose.facts.hang import world


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The last words of the one agent of a job. `listed` are the workers in its table of failures by rank, `signalled` the processes
    that it told to end; `alive` the ranks that ran until then, `left` the one rank that is in neither: it had ended with success."""

    line: Line
    listed: Mapping[int, End]
    signalled: frozenset[int]
    alive: frozenset[int]
    left: int | None

    @property
    def whole(self) -> bool:
        """Whether the log shows the signals that its table tells of: parts of a log that lacks them may be missing."""
        ended = {one.pid for one in self.listed.values() if one.signal == signal.SIGTERM}
        return ended <= self.signalled


@lru_cache(maxsize=2)
def account(case: Case) -> Account | None:
    """The account of the agent, where one agent had all workers of the job; None otherwise."""
    tables = case.of("elastic-root-cause")
    if len(tables) != 1:
        return None
    agent = tables[0].line.artifact.name
    told = [one for one in ends(case) if one.line.artifact.name == agent and one.source == "elastic"]
    listed = {one.rank: one for one in told if one.rank is not None}
    signalled = frozenset(int(event.fields["pid"]) for event in case.of("elastic-closing") if event.line.artifact.name == agent)
    forced = {one.pid for one in told if one.forced}
    ran = {rank for rank, one in listed.items() if one.signal == signal.SIGTERM or one.pid in signalled}
    ran |= {seat.rank for seat in case.who.seats if seat.pid in signalled}
    return Account(
        line=tables[0].line,
        listed=listed,
        signalled=signalled,
        alive=frozenset(rank for rank in ran if rank not in listed or listed[rank].pid not in forced),
        left=_left(case, listed, signalled),
    )


def _left(case: Case, listed: Mapping[int, End], signalled: frozenset[int]) -> int | None:
    """The one rank that is neither listed nor was told to end, of workers that all are this agent's."""
    everybody = world(case)
    absent = sorted(everybody - set(listed))
    if len(absent) != 1 or not listed or case.who.several or (case.who.world_size or len(everybody)) != len(everybody):
        return None
    rank = absent[0]
    seat = case.who.of(rank)
    own = seat.pid if seat is not None else None
    if own is None and len(listed) < 2:
        return None  # it may be another agent's
    others = {one.pid for one in listed.values()} | {one.pid for one in case.who.seats if one.rank != rank}
    return None if own in signalled or (own is None and signalled - others) else rank
