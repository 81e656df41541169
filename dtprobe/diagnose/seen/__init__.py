"""What tools and libraries saw of the ranks, put in place: stacks, states of processes, NCCL's log and RAS, workers' own records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from dtprobe.diagnose.case import Artifact, Case, Line
from dtprobe.diagnose.seen import nccl, observed, ras, stacks, states
from dtprobe.diagnose.seen.doing import Activity, activities
from dtprobe.diagnose.seen.nccl import NcclProcess
from dtprobe.diagnose.seen.observed import Observation, Try
from dtprobe.diagnose.seen.places import Places
from dtprobe.diagnose.seen.ras import Answer
from dtprobe.diagnose.seen.stacks import Stack
from dtprobe.diagnose.seen.states import Sample
from dtprobe.diagnose.who import Who
from dtprobe.readers.artifact import Problems


@dataclass(frozen=True, kw_only=True)
class Seen:
    """All of it. `doing` is what the main thread of each rank does, where its stack is known."""

    stacks: tuple[Stack, ...] = ()
    nccl: tuple[NcclProcess, ...] = ()
    ras: tuple[Answer, ...] = ()
    doing: Mapping[int, Activity] = field(default_factory=dict)
    states: tuple[Sample, ...] = ()
    observations: tuple[Observation, ...] = ()
    tries: tuple[Try, ...] = ()

    @property
    def ended_well(self) -> bool:
        """Whether what was seen shows that the job came to its end: every try without an error, every communicator destroyed.

        Then what a tool saw on the way is a rank that was late, not one that was lost.
        """
        tried = bool(self.tries) and all(one.ended_ns is not None and not one.error for one in self.tries)
        return tried or (bool(self.nccl) and all(one.destroyed for one in self.nccl))


@lru_cache(maxsize=4)
def of(case: Case) -> Seen:
    """What was seen of this case's job, read once."""
    return take(case.artifacts, case.lines, case.who, [])


def take(artifacts: Sequence[Artifact], lines: Sequence[Line], who: Who, problems: Problems) -> Seen:
    """Read it from the lines, and from artifacts that are read as a whole."""
    by_artifact: dict[str, list[Line]] = {}
    for line in lines:
        by_artifact.setdefault(line.artifact.name, []).append(line)
    processes = nccl.take(lines)
    answers = ras.take(artifacts, by_artifact, problems)
    places = Places.of(who, processes, answers)
    told = tuple(observed.observations(line for line in lines if line.artifact.kind in ("jsonl", "json", "text")))
    known = tuple(stacks.take(artifacts, by_artifact, places, problems))
    return Seen(
        stacks=known,
        doing=activities(known),
        states=tuple(states.take(artifacts, by_artifact, places)),
        observations=told,
        tries=tuple(observed.tries(told)),
        nccl=tuple(nccl.placed(one, places) for one in processes),
        ras=tuple(ras.placed(one, places) for one in answers),
    )
