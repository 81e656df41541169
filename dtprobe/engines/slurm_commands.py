"""Slurm's own commands: submit an array, ask what became of its elements, cancel them. Jobs are known by their names."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtprobe.errors import DtprobeError, Unavailable

ANSWER_S = 60.0
"""A loaded slurmctld takes its time; Slurm's own MessageTimeout is 10 s and is tried again."""
NEEDED = ("sbatch", "squeue", "scancel", "scontrol")

_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JWT")


@dataclass(frozen=True)
class Element:
    """An element of an array as Slurm shows it. `id` is what scancel takes (`12_3`), `state` Slurm's own word."""

    id: str
    state: str
    node: str = ""
    reason: str = ""


Key = tuple[str, int]
"""An array's name and the index of an element in it."""


@dataclass(frozen=True)
class Commands:
    """They run in the caller's environment, less what an allocation around us would ask of them."""

    environ: Mapping[str, str]

    def probe(self) -> Unavailable | None:
        for name in NEEDED:
            if shutil.which(name, path=self.environ.get("PATH")) is None:
                return Unavailable(
                    f"Slurm's {name} is not on PATH", "start it on a login node of the cluster, or put Slurm's commands on PATH"
                )
        try:
            said = self._run("scontrol", "ping")
        except subprocess.TimeoutExpired:
            return Unavailable(f"Slurm's controller has not answered within {ANSWER_S:g} s", "look at `scontrol ping`")
        if said.returncode or "UP" not in said.stdout:
            words = _last(said.stderr or said.stdout)
            return Unavailable(f"Slurm's controller does not answer: {words}", "look at `scontrol ping` and SLURM_CONF")
        return None

    def submit(self, name: str, count: int, folder: Path, command: Sequence[str], options: Sequence[str]) -> None:
        """Submit `command` as an array of `count` elements with `<folder>/<index>/log`. Raises DtprobeError with sbatch's words."""
        script = folder / "job.sh"
        script.write_text('#!/bin/sh\nexec "$@"\n', encoding="utf-8")
        said = self._run(
            *("sbatch", "--parsable", "--no-requeue", f"--array=0-{count - 1}", f"--job-name={name}", f"--chdir={folder}"),
            *("--nodes=1", "--ntasks=1", f"--output={folder}/%a/log", "--open-mode=append", *options, str(script), *command),
        )
        if said.returncode:
            raise DtprobeError(f"sbatch refused: {_last(said.stderr)}", f"options given: {' '.join(options)}")

    def states(self, names: Sequence[str]) -> dict[Key, Element] | None:
        """All elements that Slurm knows of those arrays, ended ones too; None where it does not answer."""
        try:
            said = self._run("squeue", "-h", "-r", "-t", "all", f"--name={','.join(names)}", "-o", "%j|%K|%i|%T|%N|%r")
        except subprocess.TimeoutExpired:
            return None
        if said.returncode:
            return None
        found: dict[Key, Element] = {}
        for line in said.stdout.splitlines():
            name, index, one, state, node, reason = line.split("|", 5)
            if index.isdecimal():
                found[name, int(index)] = Element(one, state, node, reason)
        return found

    def accounted(self, names: Sequence[str]) -> dict[Key, Element]:
        """The same of elements that slurmctld has forgotten, where accounting is kept; nothing where it is not."""
        try:
            said = self._run(
                *("sacct", "-n", "-P", "-X", "-S", "now-7days", f"--name={','.join(names)}"),
                *("-o", "JobName,JobID,State,NodeList"),
            )
        except (subprocess.TimeoutExpired, FileNotFoundError):
            return {}
        found: dict[Key, Element] = {}
        for line in said.stdout.splitlines() if not said.returncode else ():
            name, one, state, node = line.split("|", 3)
            index = one.partition("_")[2]
            if index.isdecimal():
                found[name, int(index)] = Element(one, state.partition(" ")[0], node)
        return found

    def cancel(self, *what: str) -> bool:
        """Cancel elements by id, or whole arrays (`--name=...`); whether Slurm took it."""
        try:
            return self._run("scancel", *what).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in self.environ.items() if key in _KEPT or not key.startswith("SLURM_")}
        # In a session of its own: a Ctrl-C is ours to answer, and must not take sbatch down between submitting and saying so.
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=env, timeout=ANSWER_S,
            start_new_session=True,
        )  # fmt: skip


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "without a word"
