"""Postmortem: what failed first, on which rank, why, and how we know, from what a dead or hung job left behind.

It needs neither torch nor a GPU, and imports nothing that starts or injects anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dtprobe.diagnose import intake
from dtprobe.diagnose.analysts import ANALYSTS
from dtprobe.diagnose.case import Case
from dtprobe.diagnose.decide import decide
from dtprobe.diagnose.diagnosis import Diagnosis
from dtprobe.diagnose.lines import read_lines
from dtprobe.diagnose.signatures import events_of
from dtprobe.diagnose.who import identify


def read(paths: Sequence[Path]) -> Case:
    """Everything that these folders, files and archives hold. Raises UsageError for a path that does not exist."""
    taken = intake.take(paths)
    problems = list(taken.problems)
    lines = [line for one in taken.artifacts if one.kind == "text" for line in read_lines(one, problems)]
    events = list(events_of(lines))
    who = identify(taken.artifacts, lines, events)
    return Case(artifacts=taken.artifacts, lines=lines, events=events, who=who, problems=problems)


def diagnose(paths: Sequence[Path]) -> Diagnosis:
    """The answer for one job, from whatever it left. Raises UsageError for a path that does not exist."""
    case = read(paths)
    return decide(case, [finding for analyse in ANALYSTS for finding in analyse(case)])
