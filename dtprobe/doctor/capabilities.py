"""The table of capabilities: what a scenario, an injector, a recorder or a test may need of a machine.

Three forms of name: a row of TABLE (`strace`), a row with a version (`torch>=2.13`), a family with an argument (`cuda:2`).
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from dtprobe.doctor import checks as has
from dtprobe.doctor.checks import Check, command, distribution, every, in_namespace, library, trial
from dtprobe.doctor.host import Machine
from dtprobe.errors import UsageError


@dataclass(frozen=True)
class Capability:
    """Something that a machine has or lacks. `version` finds the version that `name>=X` is compared with."""

    name: str
    summary: str
    check: Check
    version: Callable[[Machine], str | None] | None = None


@dataclass(frozen=True)
class Family:
    """Capabilities that differ by an argument: `cuda:2`. `made` turns the argument into a check, or raises UsageError."""

    name: str
    summary: str
    example: str
    made: Callable[[str], Check]


def _of(package: str) -> Callable[[Machine], str | None]:
    return lambda machine: machine.version(package)


_NETEM = ("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
_TBF = ("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1mbit", "burst", "10kb", "latency", "10ms")
_VETH = ("ip", "link", "add", "dtp0", "type", "veth", "peer", "name", "dtp1")
_STRACE = ("strace", "-f", "-o", "/dev/null", "-e", "trace=execve")
_KERNEL_HAS_NOT = "use a kernel that has it; the lab VM boots one"
_unshare = command("unshare", "util-linux")
_strace = every(has.linux, command("strace", "strace"))
_ip, _tc, _nft = command("ip", "iproute2"), command("tc", "iproute2"), command("nft", "nftables")

TABLE: tuple[Capability, ...] = (
    Capability("linux", "Linux; `linux>=5.11` asks for a kernel", has.linux, lambda _: platform.release()),
    Capability("root", "the superuser", has.root),
    Capability("python", "this interpreter; `python>=3.12`", lambda _: None, lambda _: platform.python_version()),
    Capability("torch", "PyTorch, any build; `torch>=2.13`", has.torch, _of("torch")),
    Capability("gloo", "PyTorch's gloo backend", every(has.linux, has.torch)),
    Capability("nccl", "PyTorch's NCCL backend and a GPU", has.cuda(1)),
    Capability("cuda", "a GPU and a PyTorch built for it; `cuda:2` for two", has.cuda(1)),
    Capability("mpi4py", "MPI for Python", every(has.mpirun, distribution("mpi4py")), _of("mpi4py")),
    Capability("mpirun", "an MPI launcher", has.mpirun),
    Capability("ray", "Ray", distribution("ray"), _of("ray")),
    Capability("slurm", "a Slurm, or its daemons and root to start one", has.slurm),
    Capability("docker", "a Docker daemon", has.docker),
    Capability("qemu", "a PC in software, for the lab VM", command("qemu-system-x86_64", "qemu-system-x86", "seabios")),
    Capability("lab", "the lab VM; the first run builds its image: a minute, from a Debian mirror", has.lab),
    Capability("cc", "a C compiler", has.any_command(("cc", "gcc", "clang"), "gcc", "libc6-dev")),
    Capability("git", "git", command("git", "git")),
    Capability("strace", "system calls of a process, traced", every(_strace, trial(*_STRACE, "true"))),
    Capability("strace-seccomp", "the same at little cost", every(_strace, trial(*_STRACE, "--seccomp-bpf", "true"))),
    Capability("ptrace", "attaching to a process that is no child", every(has.linux, has.ptrace)),
    Capability("pyspy", "Python stacks from outside", every(has.linux, distribution("py-spy"), has.ptrace)),
    Capability("gdb", "the C debugger", every(has.ptrace, command("gdb", "gdb"))),
    Capability("perf", "event counts and samples", every(has.linux, command("perf", "linux-perf"), has.perf_events)),
    Capability(
        "perf-tracepoints",
        "the kernel's tracepoints through perf",
        every(has.root, has.filesystem("tracefs"), command("perf", "linux-perf"), has.perf_events),
    ),
    Capability(
        "bpftrace",
        "probes in the kernel and in libraries",
        every(has.root, has.filesystem("tracefs"), command("bpftrace", "bpftrace")),
    ),
    Capability("nsys", "NVIDIA's timeline profiler", has.nsys),
    Capability("inotify", "changes of files", every(has.linux, has.inotify, distribution("pyinotify"))),
    Capability("netns", "network namespaces", has.netns),
    Capability("veth", "virtual network cables", in_namespace(*_VETH, tool=_ip)),
    Capability("tun", "packets through a program", every(has.netns, has.device("/dev/net/tun", "modprobe tun"))),
    Capability("tc", "bandwidth limits (tbf)", in_namespace(*_TBF, tool=_tc)),
    Capability("netem", "delay and loss in the kernel", in_namespace(*_NETEM, tool=_tc, remedy=_KERNEL_HAS_NOT)),
    Capability("nftables", "packet filter rules", in_namespace("nft", "add", "table", "inet", "dtprobe", tool=_nft)),
    Capability("tcpreplay", "recorded packets sent again", every(has.root, command("tcpreplay", "tcpreplay"))),
    Capability("rdma", "an RDMA device", has.rdma),
    Capability("verbs", "RDMA verbs: a device and perftest, or the lab VM", has.verbs),
    Capability(
        "fuse",
        "file systems in a program",
        every(
            has.device("/dev/fuse", "modprobe fuse"),
            has.any_command(("fusermount3", "fusermount"), "fuse3"),
            library("libfuse3-3", "libfuse3.so", "libfuse.so"),
            distribution("mfusepy"),
        ),
    ),
    Capability(
        "mount",
        "mounts in a namespace of one's own",
        every(_unshare, trial("unshare", "--mount", "true", remedy=has.NEEDS_ROOT)),
    ),
    Capability("userns", "namespaces without root", every(_unshare, trial("unshare", "--user", "--map-root-user", "true"))),
    Capability("cgroup-v1", "control groups, version 1", has.cgroup_v1),
    Capability("cgroup-v2", "control groups, version 2", has.cgroup_v2),
    Capability("cgroup-memory", "a memory limit for a group of processes", has.cgroup_controller("memory")),
    Capability("cgroup-cpu", "a processor quota for a group of processes", has.cgroup_controller("cpu")),
    Capability("cgroup-freezer", "freezing a group of processes", has.cgroup_controller("freezer")),
    Capability("libfaketime", "a process's own clock", library("faketime", "faketime/libfaketime.so")),
    Capability(
        "chromium",
        "a browser without a screen",
        every(
            has.any_command(("chromium", "chromium-browser", "google-chrome"), "chromium"),
            command("chromedriver", "chromium-driver"),
        ),
    ),
    Capability(
        "prometheus", "Prometheus and promtool", every(command("prometheus", "prometheus"), command("promtool", "prometheus"))
    ),
)


def _number(name: str, argument: str) -> int:
    if not argument.isdecimal() or int(argument) < 1:
        raise UsageError(f"{name}:{argument}: a count from 1 on is wanted", f"write {name}:2")
    return int(argument)


FAMILIES: tuple[Family, ...] = (
    Family("cuda", "that many GPUs", "cuda:2", lambda argument: has.cuda(_number("cuda", argument))),
    Family("cores", "that many usable cores", "cores:4", lambda argument: has.cores(_number("cores", argument))),
    Family("memory", "that many GiB available", "memory:16", lambda argument: has.memory_gib(_number("memory", argument))),
    Family("command", "any program on PATH", "command:rsync", lambda argument: command(argument, argument)),
    Family("package", "any Python package", "package:ray>=2", has.requirement),
)

_BY_NAME: Mapping[str, Capability] = {row.name: row for row in TABLE}
_NAME = re.compile(r"([a-z][a-z0-9_-]*)(?::(.+)|\s*([<>=!~].*))?", re.IGNORECASE)


def named(name: str) -> Capability:
    """The capability that a name means; raises UsageError with the closest names for one that means nothing."""
    parts = _NAME.fullmatch(name.strip())
    bare, argument, spec = parts.groups() if parts else (name, None, None)
    bare = bare.lower().replace("_", "-")
    row = _BY_NAME.get(bare)
    if argument is None and spec is None and row is not None:
        return row
    if argument is not None:
        for family in FAMILIES:
            if family.name == bare:
                return Capability(name, family.summary, family.made(argument))
    if spec is not None and row is not None and row.version is not None:
        return Capability(name, row.summary, _versioned(row, spec))
    known = [*_BY_NAME, *(family.example for family in FAMILIES)]
    close = get_close_matches(name.lower(), known, n=3, cutoff=0.5) or get_close_matches(bare, known, n=3, cutoff=0.4)
    what = f"{bare} takes no version" if spec and row else f"no capability is called {name!r}"
    raise UsageError(what, f"perhaps {', '.join(close)}" if close else "dtprobe doctor lists them")


def _versioned(row: Capability, spec: str) -> Check:
    has.version_in(row.name, "0", spec)  # says now, not on the machine that lacks it, that the requirement is malformed

    def check(machine: Machine) -> has.Unavailable | None:
        found = row.version(machine) if row.version else None
        return row.check(machine) or has.version_in(row.name, found or "0", spec)

    return check
