"""A Slurm of two nodes on this host, ended with the session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from dtprobe import doctor
from dtprobe.launch.slurm import cluster


@dataclass(frozen=True)
class Slurm:
    """A running Slurm; give `environ` to its commands."""

    environ: dict[str, str]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Skips, with doctor's reason, where no Slurm can be started."""
    unavailable = doctor.together(doctor.here().unmet(["slurm"]))
    if unavailable is not None or os.geteuid() != 0:
        pytest.skip(str(unavailable or "starting slurmd needs root"))
    with cluster(tmp_path_factory.mktemp("slurm")) as environ:
        yield Slurm(environ)
