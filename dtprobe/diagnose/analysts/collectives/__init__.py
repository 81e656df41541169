"""Flight recorders: the calls of all ranks matched with each other, group by group and pair by pair.

`recording` reads the dumps, `divergence` finds the first call at which ranks of a group disagree, `waits` who waits for whom and
`blame` what that means, `memberships`, `roots` and `lateness` the rest; `findings` writes it down.
"""

from __future__ import annotations

from collections.abc import Iterator

from dtprobe.diagnose import seen
from dtprobe.diagnose.analysts.collectives.findings import findings
from dtprobe.diagnose.analysts.collectives.recording import Recording
from dtprobe.diagnose.case import Case, Finding
from dtprobe.diagnose.diagnosis import HEALTHY

ENDED_WELL = 0.6


def analyse(case: Case) -> Iterator[Finding]:
    """What the flight recorders' dumps say; nothing where there are none, and of waits nothing where all of them came to a good end.

    A dump is a moment of a job: one that was taken while the ranks were at work shows waits, too.
    """
    if case.recording is None:
        return
    over = None
    for finding in findings(case.recording):
        waiting = {wait.rank for wait in finding.waits}
        if waiting and all(_went_on(case, case.recording, rank) for rank in waiting):
            over = finding
        else:
            yield finding
    if over is not None:
        yield Finding(
            mode=HEALTHY,
            analyst=over.analyst,
            likelihood=ENDED_WELL,
            because="where the dumps show ranks that wait for each other, each of these ranks recorded that the work went on to a good end",
            evidence=over.evidence,
            not_proven="What happened after the last record.",
        )


def _went_on(case: Case, recording: Recording, rank: int) -> bool:
    """Whether the rank recorded, without an error, the end of the work in which it had made each call that it waits in."""
    created = [
        recording.ranks[rank].columns[call.lane].created[call.place]
        for call in recording.blockers(rank, recording.open_calls(rank))
    ]
    tries = [one for one in seen.of(case).tries if one.rank == rank and one.ended_ns is not None and not one.error]
    return bool(created) and all(
        any(one.begun_ns <= moment <= one.ended_ns for one in tries if one.ended_ns is not None) for moment in created
    )
