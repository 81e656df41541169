"""A rank by what its launcher says of it, or does not say: it had ended with success, or ran on, while its peers waited for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dtprobe.diagnose.case import Case, Finding, quote
from dtprobe.diagnose.facts.agents import Account, account
from dtprobe.diagnose.facts.hang import world
from dtprobe.diagnose.facts.outcome import WELL
from dtprobe.diagnose.facts.raised import raised
from dtprobe.diagnose.facts.timeouts import waits

ANALYST = "absent"
POD = 0.66
ENDED_BADLY = frozenset({"Error", "Failed"})
_POD = re.compile(r"(?P<stem>.*?)(?P<number>\d+)$")
LEFT, IN_PARTS, RAN = 0.8, 0.55, 0.64


def analyse(case: Case) -> Iterator[Finding]:
    """A finding where elastic's own account of its workers leaves out one rank, or says that the silent one ran to the end.

    The agent signals every worker that still runs, and lists every one that failed, also by that signal: who is in neither had ended.
    """
    yield from _completed(case)
    told = account(case)
    if told is not None:
        yield from _ended(case, told)
        yield from _ran(case, told)


def _completed(case: Case) -> Iterator[Finding]:
    """One pod completed while the others failed, having lost a peer or waited for one."""
    rows = {event.fields["pod"]: event for event in case.of("pod-row")}
    done = [event for event in rows.values() if event.fields["state"] in WELL]
    hurt = [one for one in raised(case) if one.effect and not one.launcher]
    if (
        len(done) != 1
        or len(rows) < 2
        or not hurt
        or any(not (one.effect or one.launcher or one.ignored) for one in raised(case))
    ):
        return
    if not all(event.fields["state"] in ENDED_BADLY for event in rows.values() if event is not done[0]):
        return
    pod, address = done[0].fields["pod"], done[0].fields.get("address")
    ranks = case.who.on(pod) or _numbered(pod, list(rows))
    named = address is not None and any(address in one.text for one in hurt)
    yield Finding(
        mode="peer-exited-early",
        analyst="pods",
        likelihood=LEFT if named else POD,
        because=f"Pod {pod} completed while all others failed{' and name its address as the peer that closed' if named else ''}.",
        first=ranks[0] if len(ranks) == 1 else None,
        suspects=ranks,
        host=pod,
        evidence=(quote(done[0].line, "cause"), *(quote(one.line, "effect") for one in hurt[:2])),
        not_proven="why it ended before its peers",
    )


def _numbered(pod: str, pods: Sequence[str]) -> tuple[int, ...]:
    """The number of a pod where the job's pods differ only in it and count from 0: launchers give it as the rank of a pod of one process."""
    found = [_POD.match(one) for one in pods]
    stems = {one["stem"] for one in found if one}
    numbers = sorted(int(one["number"]) for one in found if one)
    mine = _POD.match(pod)
    return (int(mine["number"]),) if mine and len(stems) == 1 and numbers == list(range(len(pods))) else ()


def _ended(case: Case, told: Account) -> Iterator[Finding]:
    """One rank had ended with success: its peers waited until a time-out, or saw its connections close."""
    rank = told.left
    hurt = [one for one in raised(case) if one.effect and not one.launcher]
    failed = any(not (one.effect or one.launcher or one.ignored) for one in raised(case))
    if rank is None or rank in waits(case).waiting() or any(one.rank == rank for one in hurt):
        return
    if not waits(case).timeouts and (failed or not hurt):
        return
    seat = case.who.of(rank)
    process = f" (process {seat.pid})" if seat is not None and seat.pid is not None else ""
    shown = next((one.line for one in told.listed.values()), told.line)
    yield Finding(
        mode="peer-exited-early",
        analyst=ANALYST,
        likelihood=LEFT if told.whole else IN_PARTS,
        because=f"torchrun lists every other rank and had to end none that ran on: rank {rank}{process} had ended with success, "
        "while the others waited for it.",
        first=rank,
        suspects=(rank,),
        host=seat.host if seat is not None else None,
        evidence=(
            quote(told.line, "cause"),
            quote(shown, "confirm"),
            *(quote(one.line, "effect") for one in hurt[:2]),
        ),
        not_proven="why it ended before its peers",
    )


def _ran(case: Case, told: Account) -> Iterator[Finding]:
    """The only rank without a time-out ran until the agent ended it: it is not lost, it did not come."""
    waiting = waits(case).waiting()
    silent = world(case) - waiting
    if len(waiting) < 2 or len(silent) != 1 or any(not (one.effect or one.launcher or one.ignored) for one in raised(case)):
        return
    rank = next(iter(silent))
    if rank not in told.alive:
        return
    mine = told.listed.get(rank)
    closing = next(
        (event.line for event in case.of("elastic-closing") if mine is not None and event.fields["pid"] == str(mine.pid)), None
    )
    lines = [line for line in (closing, mine.line if mine is not None else None) if line is not None]
    first = next(iter(waits(case).gloo), None) or next(iter(waits(case).timeouts))
    yield Finding(
        mode="collective-skipped",
        analyst=ANALYST,
        likelihood=RAN,
        because=f"All ranks but {rank} timed out in a collective; rank {rank} ran still when torchrun ended it, and had not come to it.",
        first=rank,
        suspects=(rank,),
        evidence=(quote(first.line, "cause"), *(quote(line, "confirm") for line in lines)),
        not_proven="what it did instead: it may have skipped the call, be busy, or be stopped",
    )
