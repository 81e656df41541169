"""Facts of the machine for `run.json`: what a reader of a report needs to judge its figures, and no secret."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "torch",
    "numpy",
    "dtprobe",
    "pandas",
    "pyarrow",
    "scipy",
    "py-spy",
    "ray",
    "mpi4py",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
"""Distributions whose versions a run records, where they are installed."""
GIT_TIMEOUT_S = 2.0
HIDDEN = "<hidden>"
_SECRET = re.compile(
    r"(?i)(^|[^a-z])(pass(word|wd|phrase)?|secrets?|token|api[_-]?keys?|credentials?|private[_-]?key|auth(orization)?)($|[^a-z])"
)
_URL_USER = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/@\s]+@")


@dataclass(frozen=True, kw_only=True)
class Git:
    """The commit that a working folder stands on. `dirty` says whether tracked files differ from it, None where git did not say in time."""

    commit: str
    dirty: bool | None


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """One machine at one moment; what cannot be found out is None. Field names carry their units."""

    host: str
    kernel: str
    architecture: str
    distribution: str | None
    cpu: str | None
    cores: int
    """Cores that this process may use."""
    cores_online: int
    cpu_quota: float | None
    """Cores' worth of processor time that the cgroup grants, None where it sets no limit."""
    memory_bytes: int
    memory_available_bytes: int
    load_1m: float
    gpus: tuple[str, ...]
    nvidia_driver: str | None
    container: tuple[str, ...]
    """Signs of a container or an orchestrator around this process."""
    python: str
    implementation: str
    versions: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The facts as `run.json` holds them under `machine`."""
        return asdict(self) | {"gpus": list(self.gpus), "container": list(self.container)}


def machine_facts(*, environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> MachineFacts:
    """The facts of this machine, in a few milliseconds and without importing torch.

    `root` is where `/proc`, `/sys` and `/etc` lie. Of the environment only the presence of well-known names is noted.
    """
    memory = psutil.virtual_memory()
    return MachineFacts(
        host=socket.gethostname(),
        kernel=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        distribution=_distribution(root),
        cpu=_cpu(root),
        cores=len(os.sched_getaffinity(0)),
        cores_online=os.cpu_count() or 1,
        cpu_quota=_cpu_quota(root),
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        load_1m=round(os.getloadavg()[0], 2),
        gpus=_gpus(root),
        nvidia_driver=_nvidia_driver(root),
        container=_container(environ, root),
        python=platform.python_version(),
        implementation=platform.python_implementation() + ("" if _has_gil() else " without GIL"),
        versions=versions(),
    )


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Installed versions by distribution name, from the installation's metadata; what is not installed is left out."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: Path, *, environ: Mapping[str, str] = os.environ, timeout_s: float = GIT_TIMEOUT_S) -> Git | None:
    """The commit of the repository around `folder`; None outside one, without git, or where git does not answer in time."""
    quiet = {**environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}

    def git(*arguments: str) -> str | None:
        try:
            answer = subprocess.run(
                ("git", "-C", str(folder), *arguments),
                check=False,
                env=quiet,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.decode(errors="replace").strip() if answer.returncode == 0 else None

    commit = git("rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    changes = git("status", "--porcelain", "--untracked-files=no")
    return Git(commit=commit, dirty=None if changes is None else bool(changes))


def without_secrets(argv: Sequence[str]) -> list[str]:
    """A command line fit to be recorded: values of options and assignments named like a secret, and users in URLs, are hidden.

    `--api-key X`, `--api-key=X`, `TOKEN=X` and `https://user:X@host` all lose X.
    """
    shown: list[str] = []
    hide_next = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("-"):
            shown.append(HIDDEN)
        elif equals and _SECRET.search(name) and "://" not in name:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(_URL_USER.sub(rf"\1{HIDDEN}@", word))
        hide_next = word.startswith("-") and not equals and bool(_SECRET.search(word))
    return shown


def _has_gil() -> bool:
    """Free-threaded builds (3.13t) say so; earlier versions have no such question."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _field(text: str | None, name: str, separator: str) -> str | None:
    """The value of the first `name<separator>value` line."""
    for line in (text or "").splitlines():
        key, found, value = line.partition(separator)
        if found and key.strip() == name:
            return value.strip().strip('"') or None
    return None


def _distribution(root: Path) -> str | None:
    text = _text(root / "etc/os-release") or _text(root / "usr/lib/os-release")
    return _field(text, "PRETTY_NAME", "=") or _field(text, "NAME", "=")


def _cpu(root: Path) -> str | None:
    text = _text(root / "proc/cpuinfo")
    return _field(text, "model name", ":") or _field(text, "Model", ":") or _field(text, "CPU part", ":")


def _cpu_quota(root: Path) -> float | None:
    """The tightest quota among this process's cgroup and its parents, v2 and v1."""
    limits = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, place = line.split(":", 2)
        parts = Path(place.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            inner = Path(*parts[:depth])
            if not controllers:
                limits.append(_quota((_text(root / "sys/fs/cgroup" / inner / "cpu.max") or "").split()))
            elif "cpu" in controllers.split(","):
                base = root / "sys/fs/cgroup/cpu" / inner
                limits.append(_quota([(_text(base / f"cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period")]))
    return min((limit for limit in limits if limit is not None), default=None)


def _quota(pair: Sequence[str]) -> float | None:
    if len(pair) != 2 or not all(word.isdigit() for word in pair) or pair[1] == "0":
        return None  # "max", "-1", or no such file: no limit
    return round(int(pair[0]) / int(pair[1]), 3)


def _gpus(root: Path) -> tuple[str, ...]:
    """GPUs by model, as NVIDIA's driver lists them in /proc."""
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    return tuple(_field(_text(path), "Model", ":") or "unnamed" for path in folders)


def _nvidia_driver(root: Path) -> str | None:
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", _text(root / "proc/driver/nvidia/version") or "")
    return found[1] if found else None


def _container(environ: Mapping[str, str], root: Path) -> tuple[str, ...]:
    signs = {
        "docker": (root / ".dockerenv").exists(),
        "podman": (root / "run/.containerenv").exists(),
        "kubernetes": "KUBERNETES_SERVICE_HOST" in environ,
        "slurm": "SLURM_JOB_ID" in environ,
        "torchrun": "TORCHELASTIC_RUN_ID" in environ,
        "ci": environ.get("CI", "").lower() in ("true", "1"),
        "gvisor": "gVisor" in (_text(root / "proc/version") or ""),
        "wsl": "microsoft" in (_text(root / "proc/version") or "").lower(),
    }
    return tuple(name for name, present in signs.items() if present)
