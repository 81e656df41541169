"""Where a process stands in its job, read from the environment that a launcher left.

`resolve` is a pure function of a mapping. Each launcher has one resolver, which makes a full claim, a partial one, or none;
fields of two launchers are never mixed. MASTER_ADDR and MASTER_PORT belong to no launcher: where they are set they name
the meeting point, as torch's `env://` has it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from dtprobe.framework.errors import FrameworkError


class PlacementError(FrameworkError):
    """The environment contradicts itself, or says too little: exit code 2, nothing was started."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One launcher's full claim about this process.

    `local_rank`, `node_rank` and their totals are None where the launcher does not say; `verify` fills them from the hosts
    that ranks report. `master_port` None means: the first free one of `ports(run)`. `disagreed` are claims of outer
    launchers that were overruled because this one provably runs inside them.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    nodes: int | None
    master_addr: str
    master_port: int | None
    source: str
    run: str
    """Names this run and no other one: a launcher's job id, empty where it gives none. Restarts differ in `attempt`."""
    attempt: int = 0
    agent_store: bool = False
    """The launcher's agent serves the store at the meeting point already (torchrun)."""
    disagreed: tuple[Placement, ...] = ()
    read: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The variables this claim rests on, those of rank and world size first."""

    def __post_init__(self) -> None:
        for name, value, total in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
            ("node rank", self.node_rank, self.nodes),
        ):
            if value is not None and (value < 0 or (total is not None and value >= total)):
                raise PlacementError(
                    f"{self.source}: {name} {value} of {total} is impossible ({_shown(self.read)})", _START_AGAIN
                )
        for name, part in (("local world size", self.local_world_size), ("number of nodes", self.nodes)):
            if part is not None and not 1 <= part <= self.world_size:
                raise PlacementError(
                    f"{self.source}: {name} {part} does not fit a world of {self.world_size} ({_shown(self.read)})",
                    _START_AGAIN,
                )
        if self.source not in UNORDERED and self.local_rank is not None and self.local_rank > self.rank:
            raise PlacementError(
                f"{self.source}: local rank {self.local_rank} is above rank {self.rank} ({_shown(self.read)})", _START_AGAIN
            )

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} ({self.source}: {_shown(dict(islice(self.read.items(), 2)))})"


@dataclass(frozen=True)
class Partial:
    """Some of a launcher's variables without the rest: no claim, but what they say must not contradict the claim chosen."""

    source: str
    rank: int | None
    world_size: int | None
    missing: tuple[str, ...]
    read: Mapping[str, str]

    def __post_init__(self) -> None:
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise PlacementError(
                f"{self.source}: rank {self.rank} of {self.world_size} is impossible ({_shown(self.read)})", _START_AGAIN
            )

    def __str__(self) -> str:
        return f"{self.source}: {_shown(self.read)} without {', '.join(self.missing)}"


class Launcher(Protocol):
    """A module of `launchers`."""

    def claim(self, environ: Mapping[str, str]) -> Placement | Partial | None: ...

    def runs_inside(self, claim: Placement, outer: Placement | Partial, environ: Mapping[str, str]) -> bool:
        """Whether `claim` is this launcher's and provably was started as a task of `outer`."""


UNORDERED = ("mpirun",)
"""Sources whose local ranks need not rise with the rank: on an oversubscribed node of two cores Open MPI 5 gives 0, 2, 1, 3."""

_START_AGAIN = "the variables come from one launcher and contradict each other: someone overwrote one of them"

PRECEDENCE = ("torchrun", "openmpi", "pmi", "slurm", "pytorchjob", "indexed_job", "explicit")
"""Modules of `launchers`, innermost first: of claims that agree the first is taken, of nested ones the inner."""

_REMEDIES = {
    ("torchrun", "slurm"): "start one torchrun a node that all meet: srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES "
    "--rdzv-backend=c10d --rdzv-endpoint=HOST:PORT ...; for separate jobs unset SLURM_PROCID",
    ("torchrun", "openmpi"): "start one torchrun a node that all meet: mpirun --map-by ppr:1:node torchrun --nnodes=N "
    "--rdzv-backend=c10d --rdzv-endpoint=HOST:PORT ...",
    ("torchrun", "indexed_job"): "let all pods meet: torchrun --nnodes=PODS --rdzv-endpoint=POD0:PORT ...; "
    "for separate jobs unset JOB_COMPLETION_INDEX",
    ("openmpi", "slurm"): "start mpirun once: from the batch script, or by srun --ntasks=1",
    ("slurm", "explicit"): "unset RANK and WORLD_SIZE, or set them from SLURM_PROCID and SLURM_STEP_NUM_TASKS",
    ("openmpi", "explicit"): "unset RANK and WORLD_SIZE, or set them from OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE",
    ("indexed_job", "explicit"): "unset RANK: the Job's JOB_COMPLETION_INDEX is the rank",
}


def resolve(environ: Mapping[str, str]) -> Placement:
    """The placement that `environ` describes: a launcher's full claim, or rank 0 of 1 where no launcher spoke.

    Raises PlacementError, with both claims and the remedy, when two claims disagree and neither provably runs inside the
    other, when a variable is malformed or out of range, and when a launcher's variables are incomplete.
    """
    launchers = {name: importlib.import_module(f"dtprobe.framework.bootstrap.launchers.{name}") for name in PRECEDENCE}
    found = [(name, launcher.claim(environ)) for name, launcher in launchers.items()]
    claims = [(name, each) for name, each in found if isinstance(each, Placement)]
    partials = [(name, each) for name, each in found if isinstance(each, Partial)]
    if not claims:
        if partials:
            partial = partials[0][1]
            raise PlacementError(
                f"incomplete placement: {partial}", f"set {', '.join(partial.missing)} too, or unset the others"
            )
        return _alone(environ)
    chosen_name, chosen = claims[0]
    overruled: list[Placement] = []
    for name, other in claims[1:]:
        if _agree(chosen, other):
            continue
        if not launchers[chosen_name].runs_inside(chosen, other, environ):
            raise PlacementError(f"{chosen} and {other} disagree", _remedy(chosen_name, name))
        overruled.append(other)
    for name, partial in partials:
        if not _fits(chosen, partial) and not launchers[chosen_name].runs_inside(chosen, partial, environ):
            raise PlacementError(f"{chosen} and {partial} disagree", _remedy(chosen_name, name))
    return replace(chosen, disagreed=tuple(overruled))


def _alone(environ: Mapping[str, str]) -> Placement:
    meeting = meeting_point(environ)
    return Placement(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        nodes=1,
        master_addr=meeting.addr or "127.0.0.1",
        master_port=meeting.port,
        source="single",
        run="single",
        read={},
    )


def _agree(one: Placement, other: Placement) -> bool:
    return (one.rank, one.world_size) == (other.rank, other.world_size) and (
        one.local_rank is None or other.local_rank is None or one.local_rank == other.local_rank
    )


def _fits(claim: Placement, partial: Partial) -> bool:
    return partial.rank in (None, claim.rank) and partial.world_size in (None, claim.world_size)


def _remedy(inner: str, outer: str) -> str:
    return _REMEDIES.get((inner, outer), "unset the variables of the launcher that did not start this process")


def _shown(read: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in read.items())


@dataclass(frozen=True)
class MeetingPoint:
    """MASTER_ADDR and MASTER_PORT, each None where not set."""

    addr: str | None
    port: int | None


def meeting_point(environ: Mapping[str, str]) -> MeetingPoint:
    """Where ranks meet, as far as the environment names it; raises PlacementError for a port that is none."""
    port = whole_number(environ, "MASTER_PORT")
    if port is not None and not 1 <= port <= 65535:
        raise PlacementError(f"MASTER_PORT={port} is no port", "use 1 to 65535, or unset it and let one be chosen")
    return MeetingPoint(environ.get("MASTER_ADDR") or None, port)


def whole_number(environ: Mapping[str, str], name: str) -> int | None:
    """The non-negative integer in a variable, None where it is not set or empty; PlacementError for anything else."""
    value = environ.get(name, "")
    if value == "":
        return None
    if not (value.isascii() and value.isdigit()):
        raise PlacementError(f"{name}={value!r} is not a whole number", "unset it or correct it")
    return int(value)


def read(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    """The variables among `names` that are set, for the record."""
    return {name: environ[name] for name in names if environ.get(name)}
