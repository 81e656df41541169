"""Faults of the environment: variables of Slurm, Kubernetes, MPI and torchrun that are set, missing or in contradiction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dtprobe import processes
from dtprobe.inject import Injector, Site
from dtprobe.inject.entered import EnteredInjection, Entry, Value
from dtprobe.inject.spec import Fault

Family = Literal["slurm", "kubernetes", "mpi", "elastic"]
_RANK: Value = {"of": "rank"}
_SIZE: Value = {"of": "world_size"}

FAMILIES: Mapping[str, Mapping[str, Value]] = {
    "slurm": {
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": _RANK,
        "SLURM_LOCALID": _RANK,
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": _SIZE,
        "SLURM_STEP_NUM_TASKS": _SIZE,
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": _SIZE,
        "SLURM_STEP_NODELIST": "localhost",
    },
    "kubernetes": {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_SERVICE_PORT": "443",
        "JOB_COMPLETION_INDEX": _RANK,
        "PET_NNODES": _SIZE,
        "PET_NODE_RANK": _RANK,
        "PET_NPROC_PER_NODE": "1",
    },
    "mpi": {
        "OMPI_COMM_WORLD_RANK": _RANK,
        "OMPI_COMM_WORLD_SIZE": _SIZE,
        "OMPI_COMM_WORLD_LOCAL_RANK": _RANK,
        "OMPI_COMM_WORLD_LOCAL_SIZE": _SIZE,
        "PMIX_NAMESPACE": "4242",
        "PMIX_RANK": _RANK,
    },
    "elastic": {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": _RANK,
        "ROLE_WORLD_SIZE": _SIZE,
        "RANK": _RANK,
        "WORLD_SIZE": _SIZE,
        "LOCAL_RANK": _RANK,
        "LOCAL_WORLD_SIZE": _SIZE,
    },
}
"""What a launcher sets in a rank of a job on one node (slurmstepd(8), the Kubernetes Job and PyTorchJob controllers, Open MPI, torchrun)."""

OURS = re.compile(r"DTPROBE_.*|PYTHONPATH")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(f"var={name} is no name of a variable")
    if OURS.fullmatch(name):
        raise ValueError(f"var={name} carries the harness's own hook into the ranks")


@dataclass(frozen=True, kw_only=True)
class Set:
    """The variable `var` has that `value`, whatever the launcher says."""

    var: str
    value: str

    def __post_init__(self) -> None:
        _check_name(self.var)

    def entry(self) -> Entry:
        return Entry(set={self.var: self.value}, detail=f"{self.var}={self.value}")


@dataclass(frozen=True, kw_only=True)
class Unset:
    """The variables `var` (several: A+B) are missing."""

    var: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in self.var:
            _check_name(name)

    def entry(self) -> Entry:
        return Entry(unset=self.var, detail=f"{', '.join(self.var)} unset")


@dataclass(frozen=True, kw_only=True)
class Pretend:
    """The ranks see the variables of the launcher `of`, in agreement with their own placement, as those of a job around the job."""

    of: Family

    def entry(self) -> Entry:
        return Entry(set=FAMILIES[self.of], detail=f"variables of {self.of}")


@dataclass(frozen=True, kw_only=True)
class Contradict:
    """The ranks see the variables of the launcher `of`, but with another `wrong`: the next rank, or a world that is one larger."""

    of: Family
    wrong: Literal["rank", "world_size"] = "rank"

    def entry(self) -> Entry:
        other: Value = {"of": "other_rank" if self.wrong == "rank" else "other_size"}
        found = {name: other if value == {"of": self.wrong} else value for name, value in FAMILIES[self.of].items()}
        return Entry(set=found, detail=f"variables of {self.of} with another {self.wrong.replace('_', ' ')}")


@dataclass(frozen=True, kw_only=True)
class Clear:
    """All variables that the launcher `of` sets are missing."""

    of: Family

    def entry(self) -> Entry:
        return Entry(unset=tuple(FAMILIES[self.of]), detail=f"variables of {self.of} unset")


class EnvironmentInjection(EnteredInjection):
    """Variables in force before the rank's program begins."""

    def __init__(self, fault: Fault, site: Site) -> None:
        super().__init__(fault, site)
        self._config: Set | Unset | Pretend | Contradict | Clear = fault.config  # type: ignore[assignment]
        self.entry = self._config.entry()

    def whole(self) -> bool:
        """A value that depends on the rank is nothing to a launcher."""
        return super().whole() and not isinstance(self._config, Pretend | Contradict)

    def took(self, pid: int, rank: int | None) -> bool:
        shown = processes.environ_of(pid)
        return shown.items() >= self.values(rank).items() and not set(self.entry.unset) & set(shown) and bool(shown)


injector = Injector(
    name="environment",
    layer="scheduler",
    title="variables of Slurm, Kubernetes, MPI or torchrun are set, missing, or contradict each other, on chosen ranks",
    certifies_not="The launcher itself: only its variables are put in or taken away, nothing of what it does.",
    needs=("linux", "command:env"),
    actions={"set": Set, "unset": Unset, "pretend": Pretend, "contradict": Contradict, "clear": Clear},
    targets=("rank",),
    make=EnvironmentInjection,
)
