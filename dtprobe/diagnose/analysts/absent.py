"""A rank by what its launcher says of it, or does not say: it had ended with success, or ran on, while its peers waited for it."""

from __future__ import annotations

from collections.abc import Iterator

from dtprobe.diagnose.case import Case, Finding, quote
from dtprobe.diagnose.facts.agents import Account, account
from dtprobe.diagnose.facts.hang import world
from dtprobe.diagnose.facts.raised import raised
from dtprobe.diagnose.facts.timeouts import waits

ANALYST = "absent"
LEFT, IN_PARTS, RAN = 0.8, 0.55, 0.64


def analyse(case: Case) -> Iterator[Finding]:
    """A finding where elastic's own account of its workers leaves out one rank, or says that the silent one ran to the end.

    The agent signals every worker that still runs, and lists every one that failed, also by that signal: who is in neither had ended.
    """
    told = account(case)
    if told is not None:
        yield from _ended(case, told)
        yield from _ran(case, told)


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
