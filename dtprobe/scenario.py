"""The types a scenario is written in.

Nothing heavy is imported here: listing scenarios must not cost the import of torch or pandas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dtprobe.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from dtprobe.evidence import Evidence

LAYERS = ("code", "c10d", "store", "nccl", "libc", "syscall", "network", "filesystem", "process", "gpu", "scheduler")
ARMS = ("control", "fault", "mitigated")


class VerdictKind(StrEnum):
    """What a run says about a documented claim, in the order in which a suite merges them (worst last)."""

    REPRODUCED = "reproduced"
    PARTLY = "partly"
    REFUTED = "refuted"
    NOT_REPRODUCED = "not-reproduced"
    UNSUPPORTED = "unsupported"
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"

    @classmethod
    def worst(cls, kinds: list[VerdictKind]) -> VerdictKind:
        """The verdict of a suite: the last of its members' in the order above; `unsupported` for an empty suite."""
        order = list(cls)
        return max(kinds, key=order.index, default=cls.UNSUPPORTED)


class Mitigation(StrEnum):
    """Whether the cure works: `none` where the scenario has no mitigated arm, or it was not run."""

    HELD = "held"
    FAILED = "failed"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A measured value with the interval that its repeats allow (95 %, the method is named in `method`)."""

    value: float
    low: float
    high: float
    n: int
    method: str


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One measure over the three arms; an arm that was not run or could not be measured is None."""

    control: Estimate | None = None
    fault: Estimate | None = None
    mitigated: Estimate | None = None
    unit: str
    documented: str = ""
    """What the document claims for this measure, in its own figures; empty where it says nothing."""

    def arm(self, name: str) -> Estimate | None:
        return {"control": self.control, "fault": self.fault, "mitigated": self.mitigated}[name]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A judge's answer.

    `control_healthy` is the judge's own finding about the control arm. The runner turns any verdict whose control is not
    healthy into `inconclusive`, whatever the fault arm showed (the rule of three arms).
    """

    kind: VerdictKind
    mitigation: Mitigation = Mitigation.NONE
    control_healthy: bool
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    because: str


@dataclass(frozen=True)
class Arm:
    """One way to run a scenario's workload.

    `program` is a path relative to the scenario's folder: a `.py` file runs under the current interpreter, anything else is
    executed. `timeout_s` overrides the scenario's for this arm; an arm that is expected to hang sets it short.
    """

    program: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    faults: tuple[str, ...] = ()
    """Injections in the fault grammar (`process:stop,rank=1,after_s=5`)."""


class Probe(Protocol):
    """The configuration of a recorder: a frozen dataclass that says whether it can record here and makes the recorder.

    `heavy` probes disturb what they watch (ptrace, sampling at high rate): they run in the traced repeat only.
    """

    @property
    def name(self) -> str: ...

    @property
    def heavy(self) -> bool: ...

    def probe(self) -> Unavailable | None:
        """None where it can record here, else why not and what to do. Costs milliseconds, starts nothing that lasts."""

    def recorder(self, where: Any) -> Any:
        """A `dtprobe.probes.Recorder` for one arm run described by `where` (`dtprobe.probes.Where`)."""


Judge = Callable[["Evidence"], Verdict]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A failure mode made runnable: three arms of one workload, what is recorded of them, and the judge.

    `failure_mode` is an id of the taxonomy. `needs` names capabilities (`dtprobe doctor` lists them); a scenario whose needs
    are not met ends `unsupported`. `expect` pins the verdict by torch version: requirement specifiers such as
    `torch>=2.13` to verdict names, the first that matches the running torch counts. `variant` is empty for a scenario
    that has only one form; of several variants the one with `default=True` answers to the bare name.
    """

    name: str
    failure_mode: str
    title: str
    claim: str
    source: str
    layer: str
    certifies_not: str
    variant: str = ""
    default: bool = False
    world_size: int = 2
    launch: str = "local"
    timeout_s: float = 60
    repeats: int = 3
    needs: tuple[str, ...] = ("linux", "torch")
    tags: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = ()
    measures_cost: bool = True
    """Whether control also runs without recorders, to tell what they cost; not where they see only an emulator."""
    control: Arm
    fault: Arm
    mitigated: Arm | None = None
    no_cure_because: str = ""
    """Why there is no mitigated arm; required when `mitigated` is None."""
    expect: Mapping[str, str] = field(default_factory=dict)
    looks_like: tuple[str, ...] = ()
    """Failure modes that leave the same evidence as the fault arm: what a postmortem may answer instead of `failure_mode`. Only where no
    artifact of a real job tells the two apart, or where the claim is refuted and this is what happens instead."""
    folder: Path = Path()
    """Where the scenario lies; filled in by the catalogue."""
    _judges: list[Judge] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.layer not in LAYERS:
            raise UsageError(f"scenario {self.id}: layer {self.layer!r} is not one of {', '.join(LAYERS)}")
        if self.mitigated is None and not self.no_cure_because:
            raise UsageError(f"scenario {self.id}: no mitigated arm", "add one, or say why in no_cure_because")
        if self.repeats < 1 or self.world_size < 1 or self.timeout_s <= 0:
            raise UsageError(
                f"scenario {self.id}: repeats={self.repeats}, world_size={self.world_size}, timeout_s={self.timeout_s}",
                "all three must be positive",
            )
        kinds = {kind.value for kind in VerdictKind}
        for spec, kind in self.expect.items():
            if kind not in kinds:
                raise UsageError(f"scenario {self.id}: expect[{spec!r}] is {kind!r}, not one of {', '.join(sorted(kinds))}")

    @property
    def id(self) -> str:
        """`name`, or `name:variant`."""
        return f"{self.name}:{self.variant}" if self.variant else self.name

    @property
    def arms(self) -> dict[str, Arm]:
        """The arms that exist, in the order in which they run."""
        found = {"control": self.control, "fault": self.fault}
        return found | ({"mitigated": self.mitigated} if self.mitigated else {})

    def judge(self, function: Judge) -> Judge:
        """Decorator: register the function from evidence to verdict. A scenario has exactly one."""
        if self._judges:
            raise UsageError(f"scenario {self.id} has two judges", "keep one")
        self._judges.append(function)
        return function

    def judgement(self, evidence: Evidence) -> Verdict:
        """The judge's verdict; raises UsageError where none was registered."""
        if not self._judges:
            raise UsageError(f"scenario {self.id} has no judge", "decorate one with @scenario.judge")
        return self._judges[0](evidence)

    def with_variant(self, variant: str, **changes: Any) -> Scenario:
        """A variant: this scenario with some fields changed and a judge of its own to be registered."""
        return replace(self, variant=variant, _judges=[], **changes)

    def without_fault(self) -> Scenario:
        """This scenario with the healthy workload in the fault arm: its judge must then see no failure."""
        return replace(self, fault=self.control)

    def without_cure(self) -> Scenario:
        """This scenario with the fault arm's workload in the mitigated arm: its mitigation must then fail."""
        return replace(self, mitigated=self.fault)
