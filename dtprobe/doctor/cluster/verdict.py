"""What a check of the cluster answers: problems, each with its ranks and its remedy in one line, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dtprobe.doctor.cluster.clocks import Offset
from dtprobe.doctor.cluster.facts import Facts
from dtprobe.doctor.cluster.matrix import Link

SCHEMA = "dtprobe.cluster/1"

Severity = Literal["error", "warning", "note"]
"""An error keeps a job from working, a warning makes it slow or fragile; a note is worth knowing and leaves the cluster healthy."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong: where, what was found, what is wanted, and what to do about it."""

    check: str
    severity: Severity
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    found: str
    wanted: str
    remedy: str

    @property
    def where(self) -> str:
        """`rank 2 on host-b`, as people write it; the whole job where no rank is meant."""
        who = ranks(self.ranks)
        return f"{who} on {', '.join(self.hosts)}" if self.hosts and len(self.hosts) <= 4 else who

    def __str__(self) -> str:
        wanted = f" (wanted: {self.wanted})" if self.wanted else ""
        return f"{self.severity}: {self.check}: {self.where}: {self.found}{wanted}; {self.remedy}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ranks": list(self.ranks), "hosts": list(self.hosts)}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective that was tried: whether each rank got the right values. `wrong` are ranks that did not."""

    transport: str
    op: str
    dtype: str
    elements: int
    wrong: tuple[int, ...]
    blamed: tuple[int, ...]
    """Ranks whose contribution is what was wrong or lacking in the results."""


@dataclass(kw_only=True)
class ClusterReport:
    """Everything that was found out, as far as it came: a job that broke off has an error and less of the rest."""

    launcher: str
    world_size: int
    hosts: Mapping[str, Sequence[int]]
    """Host name -> its ranks."""
    ranks: Sequence[Facts]
    problems: list[Problem] = field(default_factory=list)
    collectives: Sequence[Collective] = ()
    links: Sequence[Link] = ()
    not_measured: str = ""
    """Which links were left out, and why; empty where all were measured."""
    offsets: Sequence[Offset] = ()
    stages_s: Mapping[str, float] = field(default_factory=dict)
    started_ns: int = 0
    took_s: float = 0.0
    deadline_s: float = 0.0
    dtprobe: str = ""

    @property
    def faults(self) -> list[Problem]:
        """Errors and warnings, the worst first."""
        return [each for kind in ("error", "warning") for each in self.problems if each.severity == kind]

    @property
    def notes(self) -> list[Problem]:
        return [each for each in self.problems if each.severity == "note"]

    @property
    def healthy(self) -> bool:
        return not self.faults

    @property
    def single(self) -> bool:
        """Whether no launcher started more than this one process."""
        return self.world_size == 1

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "healthy": self.healthy,
            "launcher": self.launcher,
            "world_size": self.world_size,
            "hosts": {host: list(ranks) for host, ranks in self.hosts.items()},
            "started_ns": self.started_ns,
            "took_s": round(self.took_s, 3),
            "deadline_s": self.deadline_s,
            "dtprobe": self.dtprobe,
            "problems": [each.as_json() for each in self.faults],
            "notes": [each.as_json() for each in self.notes],
            "collectives": [asdict(each) | {"right": not each.wrong} for each in self.collectives],
            "links": [each.as_json() for each in self.links],
            "not_measured": self.not_measured,
            "clocks": [asdict(each) for each in self.offsets],
            "ranks": [each.as_json() for each in self.ranks],
            "stages_s": {name: round(value, 3) for name, value in self.stages_s.items()},
        }


def ranks(numbers: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`; `the job` for none."""
    found = sorted(set(numbers))
    if not found:
        return "the job"
    spans: list[list[int]] = []
    for each in found:
        if spans and each == spans[-1][1] + 1:
            spans[-1][1] = each
        else:
            spans.append([each, each])
    text = ", ".join(f"{low}-{high}" if high > low + 1 else ", ".join(map(str, range(low, high + 1))) for low, high in spans)
    return f"rank{'s' if len(found) > 1 else ''} {text}"
