"""Several dumps of one rank: the earliest that shows a call open tells what hung first.

CPU backends count a call that failed as done. What a dump taken at the first hang shows is gone from the last one, when the job has gone on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dtprobe.diagnose.analysts.collectives.blame import blamed
from dtprobe.diagnose.analysts.collectives.divergence import BARRIERS
from dtprobe.diagnose.analysts.collectives.findings import quote
from dtprobe.diagnose.analysts.collectives.kinds import base
from dtprobe.diagnose.analysts.collectives.recording import Recording, gather, rank_named
from dtprobe.diagnose.analysts.collectives.waits import Graph
from dtprobe.diagnose.case import Artifact, Case, Finding
from dtprobe.readers.artifact import ReaderError
from dtprobe.readers.flight_calls import read_calls
from dtprobe.readers.flight_columns import DONE, RankCalls, Tables

ANALYST = "moments"
MOST_BYTES = 64 << 20
SHOWN = 4
CROSSED = "cross-communicator-deadlock"


def analyse(case: Case) -> Iterator[Finding]:
    """A deadlock that the earliest dumps with open calls show: ranks that wait for each other cannot be a picture out of date."""
    if case.recording is None:
        return
    recording = _earliest(case)
    if recording is None:
        return
    graph = Graph(recording)
    if not graph.cycles():
        return
    for one in blamed(graph):
        if one.mode == CROSSED and any(base(recording.kind(call).op) in BARRIERS for call, _ in one.causes):
            continue  # who waits in a barrier has left the loop that the others are in: no two groups were entered crosswise
        yield Finding(
            mode=one.mode,
            analyst=ANALYST,
            likelihood=one.likelihood,
            because=one.because,
            first=one.first,
            suspects=one.suspects,
            at_ns=min((recording.created(call) for call, _ in one.causes), default=None),
            evidence=tuple(quote(recording, call, "cause", before) for call, before in one.causes[:SHOWN]),
            not_proven=one.not_proven,
        )


def _earliest(case: Case) -> Recording | None:
    """Of each rank with several dumps the earliest with an open call; None where no rank has several, or none of them one."""
    dumps: dict[int, list[Artifact]] = {}
    for one in case.artifacts:
        if one.kind == "flight-recorder" and (rank := rank_named(one)) is not None:
            dumps.setdefault(rank, []).append(one)
    several = {rank: found for rank, found in dumps.items() if len(found) > 1}
    if not several or sum(one.size for found in several.values() for one in found) > MOST_BYTES:
        return None
    chosen: list[Artifact] = []
    for rank, found in dumps.items():
        read = [(calls.last_ns, one.name, one) for one in found if (calls := _calls(one)) is not None and _open(calls)]
        if read:
            chosen.append(replace(min(read, key=lambda item: item[:2])[2], rank=rank))
    return gather(chosen, []) if len(chosen) > 1 else None


def _calls(artifact: Artifact) -> RankCalls | None:
    try:
        return read_calls(artifact.path, Tables(), artifact.name)
    except ReaderError:
        return None  # said already, where all dumps were gathered


def _open(calls: RankCalls) -> bool:
    return any(state != DONE for column in calls.columns.values() for state in column.state)
