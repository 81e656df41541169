"""The nouns of a postmortem: what was found in the artifacts, and what each part of the diagnosis says about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dtprobe.readers.artifact import Problem

if TYPE_CHECKING:
    from dtprobe.diagnose.analysts.collectives.recording import Recording
    from dtprobe.diagnose.diagnosis import Waiting
    from dtprobe.diagnose.who import Who
    from dtprobe.readers.hosts import Host

Role = Literal["cause", "effect", "confirm"]
First = int | Literal["all"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One file that the job left. `name` is its path as the user gave it or as the archive says, `path` where it can be read.

    `kind` is what its content shows (text, flight-recorder, stacks, ras, empty, binary, refused, ...); never what its folder is called.
    `rank`, `local_rank` and `host` come from its name or content, where these say so. `dated_ns` is the first full date in it,
    `near_ns` when it was last written: both only help to place stamps that tell no year. `measured` is its rank's host where the run itself
    compared the hosts' clocks.
    """

    name: str
    path: Path
    kind: str
    size: int
    rank: int | None = None
    host: str | None = None
    local_rank: int | None = None
    dated_ns: int | None = None
    near_ns: int | None = None
    measured: Host | None = None

    def placed_ns(self, t_ns: int) -> int:
        """A stamp in it on the job's clock."""
        return t_ns if self.measured is None else t_ns + self.measured.offset_at(t_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a text artifact. `text` is clean: no colours, no tags of launchers, no time stamp of theirs; `raw` as it stands.

    `t_ns` is UTC nanoseconds where the line tells a time that can be placed, else null; `zoned` whether its stamp shows a zone, without
    which it is taken as UTC. `number` counts from 1.
    """

    artifact: Artifact
    number: int
    text: str
    raw: str
    t_ns: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    zoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A line that a signature knows. `fields` are the named groups of its pattern. `rank` is the rank it is about."""

    signature: str
    line: Line
    fields: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None
    host: str | None = None
    t_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """A piece of evidence: where it stands, what it says, and what part it plays. `line` is None where the artifact has no lines."""

    file: str
    line: int | None
    text: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one analyst concludes: a failure mode, with how likely it is the job's first failure if nothing else were known.

    `first` is the rank that failed first, "all" where every rank is affected alike, None where none can be named. `suspects` are the
    ranks to look at. `at_ns` is when it happened, where known. `not_proven` says what this evidence does not show.
    """

    mode: str
    analyst: str
    likelihood: float
    because: str
    first: First = None
    suspects: tuple[int, ...] = ()
    host: str | None = None
    at_ns: int | None = None
    evidence: tuple[Quote, ...] = ()
    not_proven: str = ""
    waits: tuple[Waiting, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Everything that was read of one job. Compared by identity, so that facts joined from it are joined once.

    `recording` holds the calls of all flight recorder dumps, where there are any.
    """

    artifacts: Sequence[Artifact]
    lines: Sequence[Line]
    events: Sequence[Event]
    who: Who
    problems: Sequence[Problem]
    missing: Sequence[str] = ()
    recording: Recording | None = None

    def of(self, *signatures: str) -> list[Event]:
        """The events of these signatures, in the order in which they were read."""
        return [event for event in self.events if event.signature in signatures]


Analyst = Callable[[Case], Iterable[Finding]]


def quote(line: Line, role: Role) -> Quote:
    """The line as evidence."""
    return Quote(file=line.artifact.name, line=line.number, text=line.raw.strip()[:400], role=role)
