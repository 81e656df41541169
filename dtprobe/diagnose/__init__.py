"""Postmortem: what failed first, on which rank, why, and how we know, from what a dead or hung job left behind.

It needs neither torch nor a GPU, and imports nothing that starts or injects anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dtprobe.diagnose import intake
from dtprobe.diagnose.analysts import conclude
from dtprobe.diagnose.analysts.collectives.recording import dumps_of
from dtprobe.diagnose.analysts.collectives.recording import joined as recorded
from dtprobe.diagnose.case import Case
from dtprobe.diagnose.clock import timeline
from dtprobe.diagnose.decide import decide
from dtprobe.diagnose.diagnosis import Diagnosis
from dtprobe.diagnose.facts.restarted import of_first
from dtprobe.diagnose.hosts import home, measured
from dtprobe.diagnose.intake.kinds import TEXTS
from dtprobe.diagnose.lines import joined, planned
from dtprobe.diagnose.operations import operations
from dtprobe.diagnose.pieces import Reader, here
from dtprobe.diagnose.signatures import events_of
from dtprobe.diagnose.who import identify, seated
from dtprobe.readers.flight_columns import Tables

Tell = Callable[[str], None]


@contextmanager
def opened(paths: Sequence[Path], tell: Tell | None = None, reader: Reader = here) -> Iterator[Case]:
    """Everything that these folders, files and archives hold; what was unpacked is there as long as the context lasts.

    Raises UsageError for a path that does not exist.
    """
    with intake.taken(paths) as taken:
        yield _case(taken, tell, reader)


def read(paths: Sequence[Path], tell: Tell | None = None) -> Case:
    """The same for callers that open no artifact of an archive afterwards."""
    with opened(paths, tell) as case:
        return case


def _case(taken: intake.Taken, tell: Tell | None, reader: Reader) -> Case:
    if tell is not None:
        tell(f"reading {len(taken.artifacts):,} file{'s' * (len(taken.artifacts) != 1)}")
    problems = list(taken.problems)
    known = measured(taken.artifacts, problems)
    artifacts = known.placed(taken.artifacts)
    texts, tables = planned([one for one in artifacts if one.kind in TEXTS]), Tables()
    with reader(texts, dumps_of(artifacts)) as pieces:
        lines = joined(texts, pieces.lines(), problems)
        who = identify(artifacts, lines)
        lines = seated(who, lines)
        events = list(events_of(lines))
        recording = recorded(artifacts, pieces.dumps(tables), tables, problems)
        problems += pieces.lost()
    missing = (*known.missing(), *who.missing(), *(recording.missing if recording is not None else ()))
    return Case(
        artifacts=artifacts,
        lines=lines,
        events=events,
        who=who,
        problems=problems,
        missing=missing,
        recording=recording,
    )


def diagnose(paths: Sequence[Path], tell: Tell | None = None, reader: Reader = here) -> Diagnosis:
    """The answer for one job, from whatever it left. Raises UsageError for a path that does not exist.

    `tell` hears, in a few words, what is done now. `reader` says where the artifacts are read; the answer is the same.
    """
    with opened(paths, tell, reader) as case:
        if tell is not None:
            tell("joining what was read")
        found, failed = conclude(case)
        answer = decide(case, of_first(case, found), failed)
        return replace(
            answer,
            host=answer.host or home(case.artifacts, answer.first_failing_rank),
            read=Counter(one.kind for one in case.artifacts),
            timeline=timeline(case),
            operations=operations(case),
        )
