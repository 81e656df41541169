"""A rank that its launcher neither saw fail nor had to end: it had ended with success while its peers still waited for it."""

from __future__ import annotations

from collections.abc import Iterator

from dtprobe.diagnose.case import Case, Finding, quote
from dtprobe.diagnose.facts.ends import ends
from dtprobe.diagnose.facts.hang import world
from dtprobe.diagnose.facts.timeouts import waits

ANALYST = "absent"
LEFT = 0.8


def analyse(case: Case) -> Iterator[Finding]:
    """A finding where elastic's own account of one agent's workers leaves out one rank, and others of them waited until a time-out.

    The agent signals every worker that still runs, and lists every one that failed, also by that signal: who is in neither had ended.
    """
    closing = case.of("elastic-closing")
    tables = case.of("elastic-root-cause")
    if len(tables) != 1 or not waits(case).timeouts:
        return
    agent = tables[0].line.artifact.name
    listed = {one.rank for one in ends(case) if one.rank is not None and one.line.artifact.name == agent}
    signalled = {int(event.fields["pid"]) for event in closing}
    everybody = world(case)
    absent = sorted(everybody - listed)
    if len(absent) != 1 or not listed or (case.who.world_size or len(everybody)) != len(everybody):
        return
    rank = absent[0]
    seat = case.who.of(rank)
    if seat is None or seat.pid is None or seat.pid in signalled or rank in waits(case).waiting():
        return
    shown = next((one.line for one in ends(case) if one.rank in listed), tables[0].line)
    yield Finding(
        mode="peer-exited-early",
        analyst=ANALYST,
        likelihood=LEFT,
        because=f"torchrun lists every other rank and had to end none that ran on: rank {rank} (process {seat.pid}) had ended with success, "
        "while the others waited for it.",
        first=rank,
        suspects=(rank,),
        host=seat.host,
        evidence=(quote(tables[0].line, "cause"), quote(shown, "confirm")),
        not_proven="why it ended before its peers",
    )
