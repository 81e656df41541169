"""What a rank finds out about its own process and host, without a word to any other rank."""

from __future__ import annotations

import os
import platform
import resource
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

import dtprobe
from dtprobe.doctor.cluster.network import Interface, Network, network
from dtprobe.machine import machine_facts

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "UCX_")
_NAMES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
_MPIRUN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A resource limit of the process; None is unlimited. `memlock` counts bytes."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, kw_only=True)
class Space:
    """Bytes of a file system."""

    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of memory: the host's, and what the control group grants (None: no limit) and has charged."""

    total: int
    available: int
    cgroup_limit: int | None
    cgroup_used: int | None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The GPU that the rank would use, as CUDA reports it. Bytes."""

    index: int
    visible: int
    name: str
    uuid: str
    capability: str
    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One rank's own facts. What cannot be found out is None; a version that is None means: not there."""

    rank: int
    local_rank: int | None
    host: str
    pid: int
    user: str
    cores: int
    load: float
    """Runnable tasks over the last minute for each core that is online: above 1 processes wait for each other."""
    versions: Mapping[str, str | None]
    environment: Mapping[str, str]
    limits: Mapping[str, Limit]
    shm: Space | None
    memory: Memory
    network: Network
    rdma: tuple[str, ...]
    gpu: Gpu | None
    gpu_problem: str
    """Why no GPU is usable although the host has one; empty otherwise."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Facts:
        """The facts that `as_json` wrote."""
        net: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in data["network"].items()}
        net["interfaces"] = tuple(Interface(**{**each, "addresses": tuple(each["addresses"])}) for each in net["interfaces"])
        return cls(
            **{
                **data,
                "limits": {name: Limit(**each) for name, each in data["limits"].items()},
                "shm": Space(**data["shm"]) if data["shm"] else None,
                "memory": Memory(**data["memory"]),
                "network": Network(**net),
                "rdma": tuple(data["rdma"]),
                "gpu": Gpu(**data["gpu"]) if data["gpu"] else None,
            }
        )

    def with_gloo_address(self, address: str | None) -> Facts:
        """These facts with the address at which gloo really listens."""
        return replace(self, network=replace(self.network, gloo_address=address))


def gather(*, rank: int, local_rank: int | None, launcher: str, environ: Mapping[str, str], root: Path = Path("/")) -> Facts:
    """The facts of this process. Imports torch; asks CUDA only where torch was built for it; takes well under a second otherwise.

    `environ` is the environment that the launcher left, `root` is where /proc and /sys lie.
    """
    machine = machine_facts(environ=environ, root=root)
    gpu, gpu_problem = _gpu(local_rank, bool(machine.gpus))
    return Facts(
        rank=rank,
        local_rank=local_rank,
        host=machine.host,
        pid=os.getpid(),
        user=_user(),
        cores=machine.cores,
        load=round(machine.load_1m / machine.cores_online, 2),
        versions=_versions(launcher, environ) | {"kernel": machine.kernel, "driver": machine.nvidia_driver},
        environment={name: value for name, value in sorted(environ.items()) if name.startswith(_PREFIXES) or name in _NAMES},
        limits={name: _limit(number) for name, number in _LIMITS.items()},
        shm=_space(root / "dev/shm"),
        memory=_memory(root),
        network=network(environ, host_name=socket.gethostname()),
        rdma=tuple(sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))),
        gpu=gpu,
        gpu_problem=gpu_problem,
    )


def _versions(launcher: str, environ: Mapping[str, str]) -> dict[str, str | None]:
    import numpy
    import torch
    import torch.distributed as dist

    nccl = None
    if torch.version.cuda and dist.is_nccl_available():
        found = torch.cuda.nccl.version()
        nccl = ".".join(map(str, found)) if isinstance(found, tuple) else str(found)
    return {
        "python": platform.python_version(),
        "dtprobe": dtprobe.__version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "gloo": "part of torch" if dist.is_gloo_available() else None,
        "mpi": _mpi(environ) if launcher in ("mpirun", "pmi") else None,
        "glibc": " ".join(platform.libc_ver()).strip() or None,
    }


def _mpi(environ: Mapping[str, str]) -> str | None:
    """What `mpirun --version` calls itself; asked only under it, since the one on PATH may be another's."""
    try:
        done = subprocess.run(
            ("mpirun", "--version"),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_MPIRUN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    return lines[0].removeprefix("mpirun ").strip()[:100] if lines else None


def _limit(number: int) -> Limit:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number))
    return Limit(soft=soft, hard=hard)


def _space(path: Path) -> Space | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return Space(total=found.f_blocks * found.f_frsize, free=found.f_bavail * found.f_frsize)


def _memory(root: Path) -> Memory:
    found = psutil.virtual_memory()
    limits = [each for each in _cgroup_memory(root) if each[0] < found.total]
    limit, used = min(limits, default=(None, None), key=lambda each: each[0] or 0)
    return Memory(total=found.total, available=found.available, cgroup_limit=limit, cgroup_used=used)


def _cgroup_memory(root: Path) -> list[tuple[int, int | None]]:
    """(limit, charged) of this process's memory group and its parents, in versions 1 and 2 (cgroups(7))."""
    found = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        limit_name, used_name = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        )
        parts = Path(place.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            folder = base.joinpath(*parts[:depth])
            limit = (_text(folder / limit_name) or "").strip()
            if limit.isdigit():
                used = (_text(folder / used_name) or "").strip()
                found.append((int(limit), int(used) if used.isdigit() else None))
    return found


def _gpu(local_rank: int | None, has_one: bool) -> tuple[Gpu | None, str]:
    import torch

    if not torch.version.cuda:
        return None, "torch is built without CUDA" if has_one else ""
    try:
        count = torch.cuda.device_count()
        if not count or not torch.cuda.is_available():
            return None, "torch sees no usable GPU" if has_one else ""
        index = local_rank or 0
        if index >= count:
            return None, f"local rank {index} has no GPU of its own: {count} visible"
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return None, str(error).partition("\n")[0][:200]
    capability = f"{about.major}.{about.minor}"
    uuid = str(getattr(about, "uuid", ""))
    return Gpu(index=index, visible=count, name=about.name, uuid=uuid, capability=capability, total=total, free=free), ""


def _user() -> str:
    try:
        return psutil.Process().username()
    except (psutil.Error, KeyError):
        return str(os.getuid())


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
