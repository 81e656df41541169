"""What is wrong with the facts of all ranks: pure functions from facts to problems, each with its remedy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from packaging.version import InvalidVersion, Version

from dtprobe.doctor.cluster.facts import Facts
from dtprobe.doctor.cluster.network import subnet
from dtprobe.doctor.cluster.verdict import Problem, Severity, ranks
from dtprobe.framework.bootstrap import Placement

FLOORS = {"torch": "2.3", "cuda": "12.1", "nccl": "2.19", "mpi": "4.1.5"}
"""The documented least versions: PyTorch 2.3, CUDA 12.1, NCCL 2.19, Open MPI 4.1.5. Judged only where the thing is there."""

_NAMES = {"torch": "PyTorch", "cuda": "CUDA", "nccl": "NCCL", "mpi": "MPI"}
_HARD = ("python", "torch", "cuda", "nccl", "mpi", "gloo")
"""Versions that must be equal: these speak to their like on the other ranks, or pickle for them."""
_HARMLESS = re.compile(
    r"NCCL_DEBUG.*|TORCH_(LOGS|SHOW_CPP_STACKTRACES|CPP_LOG_LEVEL|DISTRIBUTED_DEBUG|TRACE)|.*_(FILE|DIR|PATH)"
)
"""Variables that may well differ: they say what is logged, and where."""

_MIB = 1 << 20
_SHM_TOTAL = 256 * _MIB
_SHM_FREE_A_RANK = 64 * _MIB
_NPROC = 1024
_MEMLOCK_RDMA = 64 * _MIB
_NEARLY = 0.95


def of_facts(facts: Sequence[Facts], placement: Placement, *, several_hosts: bool) -> list[Problem]:
    """Everything that can be told from what ranks say about themselves."""
    found: list[Problem] = []
    for check in (_versions, _floors, _environment, _limits, _shared_memory, _memory, _gpus):
        found += check(facts)
    found += _network(facts, several_hosts)
    found = merged(found)
    if placement.world_size == 1:
        found.append(
            problem(
                "launcher",
                "note",
                facts,
                f"one process ({placement.source}): nothing but this host was looked at",
                "",
                "start it as your job is started: torchrun --nproc-per-node=N -m dtprobe doctor --cluster, or srun, or mpirun",
            )
        )
    return found


def problem(check: str, severity: Severity, who: Iterable[Facts], found: str, wanted: str, remedy: str) -> Problem:
    """A problem of these ranks and their hosts."""
    those = list(who)
    return Problem(
        check=check,
        severity=severity,
        ranks=tuple(each.rank for each in those),
        hosts=tuple(dict.fromkeys(each.host for each in those)),
        found=found,
        wanted=wanted,
        remedy=remedy,
    )


def merged(problems: Iterable[Problem]) -> list[Problem]:
    """Problems that differ only in where they were found, as one each."""
    found: dict[tuple[str, ...], Problem] = {}
    for each in problems:
        key = (each.check, each.severity, each.found, each.wanted, each.remedy)
        same = found.get(key, each)
        found[key] = replace(
            each,
            ranks=tuple(sorted({*same.ranks, *each.ranks})),
            hosts=tuple(dict.fromkeys((*same.hosts, *each.hosts))),
        )
    return list(found.values())


def _minority(facts: Sequence[Facts], value: Callable[[Facts], Any]) -> tuple[list[Facts], str, str]:
    """(Who deviates, what they have, what most have); nobody where all agree, all of them where no value is in the majority."""
    by_rank = {each.rank: value(each) for each in facts}
    counts = Counter(by_rank.values()).most_common()
    if len(counts) < 2:
        return [], "", ""
    usual, most = counts[0]
    decided = most > counts[1][1]
    those = [each for each in facts if not decided or by_rank[each.rank] != usual]
    told = "; ".join(
        f"{_shown(one)} on {ranks(each.rank for each in those if by_rank[each.rank] == one)}"
        for one in dict.fromkeys(by_rank[each.rank] for each in those)
    )
    return (
        those,
        told,
        f"{_shown(usual)} as on {ranks(rank for rank, one in by_rank.items() if one == usual)}"
        if decided
        else "the same everywhere",
    )


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value) or "(empty)"


def _versions(facts: Sequence[Facts]) -> list[Problem]:
    found = []
    for name in facts[0].versions if facts else ():
        those, told, usual = _minority(facts, lambda each, name=name: each.versions.get(name) or "none")  # type: ignore[misc]
        if those:
            severity: Severity = "error" if name in _HARD and not _only_micro(name, facts) else "warning"
            remedy = f"install the same {_NAMES.get(name, name)} on every host: one image or environment for all ranks"
            found.append(problem("versions", severity, those, f"{_NAMES.get(name, name)} {told}", usual, remedy))
    return found


def _only_micro(name: str, facts: Sequence[Facts]) -> bool:
    """Python 3.11.2 beside 3.11.9 works together; 3.11 beside 3.12 does not (bytecode, pickles of code)."""
    return name == "python" and len({".".join((each.versions["python"] or "").split(".")[:2]) for each in facts}) == 1


def _floors(facts: Sequence[Facts]) -> list[Problem]:
    found = []
    for name, least in FLOORS.items():
        below: dict[str, list[Facts]] = {}
        for each in facts:
            version = _version(each.versions.get(name))
            if version is not None and version < Version(least):
                below.setdefault(str(each.versions[name]), []).append(each)
        for shown, those in below.items():
            what = "Open MPI" if name == "mpi" else _NAMES[name]
            found.append(
                problem(
                    "floors",
                    "error",
                    those,
                    f"{_NAMES[name]} {shown}",
                    f"{what} {least} or newer",
                    f"install {what} {least} or newer on these hosts",
                )
            )
    return found


def _version(text: str | None) -> Version | None:
    """The version in `2.13.0+cpu`, `12.8` or `(Open MPI) 5.0.11`; None for none, and for an MPI that is not Open MPI."""
    if not text or ("(" in text and "Open MPI" not in text):
        return None
    numbers = re.search(r"\d+(\.\d+)+[^\s)]*", text)
    try:
        return Version(numbers[0]) if numbers else None
    except InvalidVersion:
        return None


def _environment(facts: Sequence[Facts]) -> list[Problem]:
    found = []
    names = sorted({name for each in facts for name in each.environment})
    for name in names:
        if name == "CUDA_VISIBLE_DEVICES":
            continue  # differs by design where the launcher deals GPUs out; what comes of it is judged by the GPUs
        those, told, usual = _minority(facts, lambda each, name=name: each.environment.get(name))  # type: ignore[misc]
        if those:
            severity: Severity = "note" if _HARMLESS.fullmatch(name) else "warning"
            remedy = f"give every rank the same {name}: export it before the launcher, and pass it on (mpirun -x {name}, srun --export=ALL)"
            found.append(problem("environment", severity, those, f"{name}: {told}", usual, remedy))
    return found


def _limits(facts: Sequence[Facts]) -> list[Problem]:
    # a gloo group holds about five descriptors and one a peer; eight groups, and as many again for libraries and loaders
    files = max(512, 256 + 8 * (len(facts) + 5))
    found = []
    for name, least, of, why in (
        ("nofile", files, lambda each: True, f"at least {files} open files for {len(facts)} ranks"),
        ("nproc", _NPROC, lambda each: each.user != "root", f"at least {_NPROC} processes and threads"),
        ("memlock", _MEMLOCK_RDMA, lambda each: each.rdma, "unlimited, or at least 64 MiB, beside RDMA devices"),
    ):
        low: dict[int, list[Facts]] = {}
        for each in facts:
            soft = each.limits[name].soft
            if soft is not None and soft < least and of(each):
                low.setdefault(soft, []).append(each)
        for soft, those in low.items():
            hard = those[0].limits[name].hard
            flag = {"nofile": "-n", "nproc": "-u", "memlock": "-l"}[name]
            unit = 1024 if name == "memlock" else 1
            enough = hard is None or hard >= least
            raised = "unlimited" if hard is None else str(hard // unit)
            remedy = (
                f"ulimit {flag} {raised} before the program starts (the hard limit allows it)"
                if enough
                else f"raise {name} in /etc/security/limits.conf, the unit's Limit{name.upper()}= or the container's --ulimit"
            )
            found.append(
                problem(name, "warning", those, f"{name} limit {soft // unit}{' KiB' if unit > 1 else ''}", why, remedy)
            )
    return found


def _shared_memory(facts: Sequence[Facts]) -> list[Problem]:
    found = []
    for those in _by_host(facts).values():
        for each in those:
            if each.shm is None:
                found.append(
                    problem(
                        "shm",
                        "warning",
                        [each],
                        "/dev/shm is not mounted",
                        "a tmpfs of 1 GiB or more",
                        "mount -t tmpfs tmpfs /dev/shm",
                    )
                )
                continue
            free = _SHM_FREE_A_RANK * len(those)
            if each.shm.total < _SHM_TOTAL or each.shm.free < free:
                found.append(
                    problem(
                        "shm",
                        "warning",
                        [each],
                        f"/dev/shm has {_size(each.shm.total)}, {_size(each.shm.free)} free",
                        f"{_size(_SHM_TOTAL)} or more, {_size(free)} free for {len(those)} ranks on one host",
                        "docker run --shm-size=1g (or --ipc=host), a memory-backed emptyDir in Kubernetes, or mount -o remount,size=1G /dev/shm; "
                        "remove old segments in it",
                    )
                )
    return found


def _memory(facts: Sequence[Facts]) -> list[Problem]:
    return [
        problem(
            "memory",
            "warning",
            [each],
            f"the control group has charged {_size(each.memory.cgroup_used)} of its limit of {_size(each.memory.cgroup_limit)}",
            "room below the limit, or the kernel kills a rank",
            "raise the container's or step's memory limit (docker -m, srun --mem, resources.limits.memory)",
        )
        for each in facts
        if each.memory.cgroup_limit and each.memory.cgroup_used and each.memory.cgroup_used > _NEARLY * each.memory.cgroup_limit
    ]


def _network(facts: Sequence[Facts], several_hosts: bool) -> list[Problem]:
    found = []
    for each in facts:
        net = each.network
        if net.gloo_interface is None:
            found.append(
                problem(
                    "interface",
                    "error",
                    [each],
                    net.gloo_because,
                    "an interface of this host",
                    "unset GLOO_SOCKET_IFNAME or name one that is there",
                )
            )
        if each.gpu is not None and net.nccl_interface is None:
            found.append(
                problem(
                    "interface",
                    "error",
                    [each],
                    net.nccl_because,
                    "an interface of this host",
                    "unset NCCL_SOCKET_IFNAME or name one that is there",
                )
            )
    if not several_hosts:
        return found
    for those in _by_host(facts).values():
        each, net = those[0], those[0].network
        chosen = net.named(net.gloo_interface)
        routable = [one.name for one in net.interfaces if one.routable and not one.virtual]
        if chosen is not None and (chosen.loopback or chosen.virtual):
            remedy = f"export GLOO_SOCKET_IFNAME={routable[0] if routable else 'NAME'}, or let /etc/hosts map the host's own name to its address in the network"
            wanted = "an interface that other hosts reach"
            found.append(
                problem(
                    "interface",
                    "error" if chosen.loopback else "warning",
                    those,
                    f"gloo uses {chosen.name}: {net.gloo_because}",
                    wanted,
                    remedy,
                )
            )
        elif len(routable) > 1 and "GLOO_SOCKET_IFNAME" not in each.environment:
            remedy = "name the fast one for both: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            found.append(
                problem(
                    "interface",
                    "note",
                    those,
                    f"several candidates ({', '.join(routable)}); gloo uses {net.gloo_interface}",
                    "",
                    remedy,
                )
            )
    those, told, usual = _minority(facts, _gloo_subnet)
    if those and all(_gloo_subnet(each) for each in facts):
        remedy = "name one network for all ranks in GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME)"
        found.append(problem("interface", "warning", those, f"gloo listens in {told}", usual, remedy))
    those, told, usual = _minority(facts, _gloo_mtu)
    if those and all(_gloo_mtu(each) for each in facts):
        found.append(
            problem(
                "interface",
                "warning",
                those,
                f"MTU {told}",
                usual,
                "set one MTU on the interfaces and switches of this network",
            )
        )
    return found


def _gloo_subnet(each: Facts) -> str | None:
    holder = each.network.holding(each.network.gloo_address)
    return subnet(holder, each.network.gloo_address or "") if holder and not holder.loopback else None


def _gloo_mtu(each: Facts) -> int | None:
    holder = each.network.holding(each.network.gloo_address)
    return holder.mtu if holder and not holder.loopback else None


def _gpus(facts: Sequence[Facts]) -> list[Problem]:
    found = [
        problem(
            "gpu",
            "error" if "no GPU of its own" in each.gpu_problem else "warning",
            [each],
            each.gpu_problem,
            "a GPU of its own for each rank",
            "start at most one rank a GPU, check CUDA_VISIBLE_DEVICES, and install a torch built for this driver",
        )
        for each in facts
        if each.gpu_problem
    ]
    users: dict[tuple[str, str], list[Facts]] = {}
    for each in facts:
        if each.gpu is not None and each.gpu.uuid:
            users.setdefault((each.host, each.gpu.uuid), []).append(each)
    for (_, uuid), those in users.items():
        if len(those) > 1:
            told = f"share the GPU {uuid} ({those[0].gpu.name if those[0].gpu else ''})"
            found.append(
                problem(
                    "gpu",
                    "error",
                    those,
                    told,
                    "a GPU of its own for each rank",
                    "NCCL refuses it: deal GPUs out by local rank, or through CUDA_VISIBLE_DEVICES",
                )
            )
    usable = [each for each in facts if not each.gpu_problem]
    those, told, usual = _minority(usable, lambda each: each.gpu.name if each.gpu else "none")
    if those:
        found.append(
            problem("gpu", "warning", those, f"GPU {told}", usual, "use hosts of one kind: the slowest GPU sets the pace")
        )
    for each in facts:
        if each.gpu is not None and each.gpu.free < 0.9 * each.gpu.total:
            told = f"only {_size(each.gpu.free)} of {_size(each.gpu.total)} free on GPU {each.gpu.index}"
            found.append(
                problem(
                    "gpu",
                    "warning",
                    [each],
                    told,
                    "a GPU without other users",
                    "look with nvidia-smi for processes of an earlier job",
                )
            )
    return found


def _by_host(facts: Sequence[Facts]) -> Mapping[str, list[Facts]]:
    found: dict[str, list[Facts]] = {}
    for each in facts:
        found.setdefault(each.host, []).append(each)
    return found


def _size(value: int | None) -> str:
    if value is None:
        return "unknown"
    return f"{value / (1 << 30):.1f} GiB" if value >= 1 << 30 else f"{value / _MIB:.0f} MiB"
