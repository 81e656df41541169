"""Postmortem: what failed first, on which rank, why, and how we know, from what a dead or hung job left behind.

It needs neither torch nor a GPU, and imports nothing that starts or injects anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dtprobe.diagnose import intake
from dtprobe.diagnose.analysts import ANALYSTS
from dtprobe.diagnose.case import Case
from dtprobe.diagnose.decide import decide
from dtprobe.diagnose.diagnosis import Diagnosis
from dtprobe.diagnose.intake.kinds import TEXTS
from dtprobe.diagnose.lines import read_all
from dtprobe.diagnose.signatures import events_of
from dtprobe.diagnose.who import identify, seated

Tell = Callable[[str], None]


def read(paths: Sequence[Path], tell: Tell | None = None) -> Case:
    """Everything that these folders, files and archives hold. Raises UsageError for a path that does not exist."""
    taken = intake.take(paths)
    if tell is not None:
        tell(f"reading {len(taken.artifacts):,} files")
    problems = list(taken.problems)
    lines = read_all([one for one in taken.artifacts if one.kind in TEXTS], problems)
    who = identify(taken.artifacts, lines)
    lines = seated(who, lines)
    events = list(events_of(lines))
    return Case(artifacts=taken.artifacts, lines=lines, events=events, who=who, problems=problems, missing=who.missing())


def diagnose(paths: Sequence[Path], tell: Tell | None = None) -> Diagnosis:
    """The answer for one job, from whatever it left. Raises UsageError for a path that does not exist.

    `tell` hears, in a few words, what is done now.
    """
    case = read(paths, tell)
    if tell is not None:
        tell("joining what was read")
    return decide(case, [finding for analyse in ANALYSTS for finding in analyse(case)])
