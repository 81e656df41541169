"""The answer of a postmortem, and its JSON form `dtprobe.diagnosis/1`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtprobe.diagnose.case import Finding, First, Quote
from dtprobe.errors import DtprobeError

SCHEMA = "dtprobe.diagnosis/1"
UNDETERMINED = "undetermined"
HEALTHY = "healthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A row of the timeline. `t_ns` is UTC; `uncertainty_ns` how far it may be off against the others."""

    t_ns: int | None
    text: str
    rank: int | None = None
    host: str | None = None
    file: str | None = None
    line: int | None = None
    uncertainty_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An edge of the wait-for graph: `rank` waits in `operation` (of `group`) for rank `awaits`."""

    rank: int
    awaits: int
    operation: str
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A collective or point-to-point operation of a rank on the common clock, for the timeline.

    `begin_ns` and `end_ns` are UTC; `end_ns` is None where the rank was still in it when the evidence was taken, or was never seen
    to leave. `seq` is its number in its group.
    """

    rank: int
    name: str
    begin_ns: int
    end_ns: int | None = None
    group: str | None = None
    seq: int | None = None
    state: str | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What failed first, on which rank and host, why, and how we know.

    `confidence` is the probability that `failure_mode` is right. `ruled_out` are the findings that lost, best first. `operations`
    are the last ones of each rank, a bounded number; they are drawn, and are not part of the JSON.
    """

    failure_mode: str
    group: str
    locus: str
    first_failing_rank: First
    host: str | None
    suspects: tuple[int, ...]
    confidence: float
    because: str
    evidence: tuple[Quote, ...]
    missing: tuple[str, ...]
    fix: str
    scenario: str | None
    timeline: tuple[Moment, ...] = ()
    waits: tuple[Waiting, ...] = ()
    ruled_out: tuple[Finding, ...] = ()
    read: Mapping[str, int] = field(default_factory=dict)
    not_proven: str = ""
    operations: tuple[Operation, ...] = ()

    @property
    def json(self) -> dict[str, Any]:
        """The object that `dtprobe postmortem --json` prints."""
        return {
            "schema": SCHEMA,
            "failure_mode": self.failure_mode,
            "class": self.group,
            "locus": self.locus,
            "first_failing_rank": self.first_failing_rank,
            "host": self.host,
            "suspects": list(self.suspects),
            "confidence": round(self.confidence, 2),
            "because": self.because,
            "evidence": [{"file": one.file, "line": one.line, "text": one.text, "role": one.role} for one in self.evidence],
            "missing": list(self.missing),
            "fix": self.fix,
            "scenario": self.scenario,
            "not_proven": self.not_proven,
            "ruled_out": [_ruled_out(one) for one in self.ruled_out],
            "waits": [
                {"rank": one.rank, "awaits": one.awaits, "operation": one.operation, "group": one.group} for one in self.waits
            ],
            "timeline": [_moment(one) for one in self.timeline],
            "read": dict(self.read),
        }


def _ruled_out(finding: Finding) -> dict[str, Any]:
    return {
        "failure_mode": finding.mode,
        "first_failing_rank": finding.first,
        "host": finding.host,
        "likelihood": round(finding.likelihood, 2),
        "because": finding.because,
    }


def _moment(moment: Moment) -> dict[str, Any]:
    return {
        "t_ns": moment.t_ns,
        "text": moment.text,
        "rank": moment.rank,
        "host": moment.host,
        "file": moment.file,
        "line": moment.line,
        "uncertainty_ns": moment.uncertainty_ns,
    }


def parsed(data: Mapping[str, Any]) -> Diagnosis:
    """The diagnosis of this JSON form. Raises DtprobeError where it is of another schema or incomplete."""
    if data.get("schema") != SCHEMA:
        raise DtprobeError(f"a diagnosis of schema {data.get('schema')!r}, this version reads {SCHEMA!r}")
    try:
        return Diagnosis(
            failure_mode=data["failure_mode"],
            group=data["class"],
            locus=data["locus"],
            first_failing_rank=data["first_failing_rank"],
            host=data["host"],
            suspects=tuple(data["suspects"]),
            confidence=data["confidence"],
            because=data["because"],
            evidence=tuple(Quote(**one) for one in data["evidence"]),
            missing=tuple(data["missing"]),
            fix=data["fix"],
            scenario=data["scenario"],
            timeline=tuple(Moment(**one) for one in data["timeline"]),
            waits=tuple(Waiting(**one) for one in data["waits"]),
            ruled_out=tuple(_lost(one) for one in data["ruled_out"]),
            read=data["read"],
            not_proven=data["not_proven"],
        )
    except (KeyError, TypeError) as error:
        raise DtprobeError(f"the diagnosis is incomplete: {error}", "make it again with dtprobe postmortem") from error


def _lost(data: Mapping[str, Any]) -> Finding:
    return Finding(
        mode=data["failure_mode"],
        analyst="",
        likelihood=data["likelihood"],
        because=data["because"],
        first=data["first_failing_rank"],
        host=data["host"],
    )


def ranks_of(findings: Sequence[Finding]) -> tuple[int, ...]:
    """All ranks that these findings name."""
    named = {rank for one in findings for rank in one.suspects} | {one.first for one in findings if isinstance(one.first, int)}
    return tuple(sorted(named))
