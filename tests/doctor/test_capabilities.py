"""The table of capabilities: names, exact reasons, remedies, and what a package would cure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtprobe.doctor import Doctor, Machine, Missing
from dtprobe.doctor.capabilities import TABLE, named
from dtprobe.errors import Unavailable, UsageError
from dtprobe.launch.lab import image, recipe


class Elsewhere(Machine):
    """A machine with nothing but what a test lays under its root, and the Python distributions it names."""

    packages: dict[str, str] = {}  # noqa: RUF012  a test's own, set on the instance
    folders: dict[str, Path] = {}  # noqa: RUF012

    def version(self, distribution: str) -> str | None:
        return self.packages.get(distribution)

    def package_folder(self, module: str) -> Path | None:
        return self.folders.get(module)


@pytest.fixture
def elsewhere(tmp_path: Path):
    (tmp_path / "bin").mkdir()

    def machine(
        *, files: dict[str, str] | None = None, packages: dict[str, str] | None = None, euid: int = 1000, **environ: str
    ) -> Elsewhere:
        for path, text in (files or {}).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        made = Elsewhere(
            environ={"PATH": str(tmp_path / "bin")} | environ, root=tmp_path, euid=euid, python=str(tmp_path / "bin/python")
        )
        object.__setattr__(made, "packages", packages or {})
        object.__setattr__(made, "folders", {"torch": tmp_path / "torch"} if "torch" in (packages or {}) else {})
        return made

    return machine


def tool(folder: Path, name: str, body: str = "exit 0") -> None:
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_every_name_of_the_table_is_answered_on_this_machine_and_none_imports_torch() -> None:
    program = """
import sys
from dtprobe.doctor import Doctor, report
found = report([])
print(len(found.capabilities), "torch" in sys.modules, [one.name for one in found.capabilities if one.unavailable and not one.unavailable.reason])
"""
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split("\n")[0] == f"{len(TABLE)} False []"


def test_names_of_the_table_are_their_own_and_readable() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)
    for row in TABLE:
        assert named(row.name) is row
        assert named(row.name.upper().replace("-", "_")) is row


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("strac", "no capability is called 'strac'; perhaps strace"),
        ("cudo:2", "no capability is called 'cudo:2'; perhaps cuda:2"),
        ("cuda:x", "cuda:x: a count from 1 on is wanted"),
        ("cuda:0", "cuda:0: a count from 1 on is wanted"),
        ("strace>=6", "strace takes no version"),
        ("torch>=two", "torch>=two is no version requirement"),
        ("package:ray>>2", "is no requirement"),
        ("", "no capability is called ''"),
        ("%%%", "dtprobe doctor lists them"),
    ],
)
def test_an_unknown_name_is_a_usage_error_with_the_closest(name: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        Doctor().capability(name)
    assert told in str(caught.value)


def test_a_program_that_is_not_installed_is_remediable_by_its_package(elsewhere: Any, tmp_path: Path) -> None:
    machine = elsewhere()
    assert Doctor(machine).capability("gdb") == Missing("gdb is not installed", "apt-get install gdb", apt=("gdb",))
    tool(tmp_path, "gdb")
    assert Doctor(machine).capability("gdb") is None


def test_packages_that_lack_are_named_together(elsewhere: Any, tmp_path: Path) -> None:
    machine = elsewhere(files={"dev/fuse": ""})
    found = Doctor(machine).capability("fuse")
    assert isinstance(found, Missing)
    assert found.remedy == "apt-get install fuse3 libfuse3-3 && pip install mfusepy"
    tool(tmp_path, "fusermount3")
    found = Doctor(elsewhere(files={"usr/lib/x86_64-linux-gnu/libfuse3.so.3": ""})).capability("fuse")
    assert found == Missing("the Python package mfusepy is not installed", "pip install mfusepy", pip=("mfusepy",))
    assert Doctor(elsewhere(packages={"mfusepy": "3"})).capability("fuse") is None


def test_the_lab_names_all_its_packages_and_needs_root_only_until_its_image_is_built(elsewhere: Any, tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = Doctor(elsewhere(**cache)).capability("lab")
    assert isinstance(found, Missing)
    # debootstrap and mke2fs are found below /usr/sbin too, where this machine may have them
    assert {"qemu-system-x86", "seabios", "cpio", "util-linux"} <= set(found.apt)
    for name in ("qemu-system-x86_64", "debootstrap", "cpio", "mke2fs", "unshare"):
        tool(tmp_path, name)
    found = Doctor(elsewhere(**cache)).capability("lab")
    assert found is not None and "building needs root" in found.reason
    assert "python -m dtprobe.launch.lab build" in found.remedy
    assert Doctor(elsewhere(euid=0, **cache)).capability("lab") is None
    manifest = image.cache(cache) / recipe.key() / image.MANIFEST
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    assert Doctor(elsewhere(**cache)).capability("lab") is None
    (tmp_path / "bin" / "cpio").unlink()
    assert Doctor(elsewhere(**cache)).capability("lab") is None


def test_verbs_are_a_device_with_perftest_or_the_lab(elsewhere: Any, tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert isinstance(Doctor(elsewhere(**cache)).capability("verbs"), Missing)
    machine = elsewhere(files={"sys/class/infiniband/mlx5_0/node_type": "1: CA"}, **cache)
    assert isinstance(Doctor(machine).capability("verbs"), Missing)
    tool(tmp_path, "ib_write_bw")
    assert Doctor(machine).capability("verbs") is None


def test_what_no_package_cures_decides_over_what_one_would(elsewhere: Any) -> None:
    found = Doctor(elsewhere(euid=1000)).capability("tcpreplay")
    assert found == Unavailable("not root (user id 1000)", "start it as root")
    assert isinstance(Doctor(elsewhere(euid=0)).capability("tcpreplay"), Missing)


def test_a_tool_that_is_there_and_refused_says_what_it_said_and_is_not_remediable(elsewhere: Any, tmp_path: Path) -> None:
    tool(tmp_path, "strace", "echo 'strace: ptrace(PTRACE_TRACEME): Operation not permitted' >&2; exit 1")
    found = Doctor(elsewhere()).capability("strace")
    assert found is not None
    assert not isinstance(found, Missing)
    assert "PTRACE_TRACEME): Operation not permitted" in found.reason


def test_a_tool_that_hangs_is_given_up(elsewhere: Any, tmp_path: Path) -> None:
    tool(tmp_path, "sleeper", "exec /bin/sleep 600")
    ran = elsewhere().run("sleeper", timeout_s=0.2)
    assert ran.code is None
    assert ran.complaint == "sleeper did not answer in 0.2 s"


@pytest.mark.parametrize(
    ("nodes", "chosen", "name", "told"),
    [
        (0, None, "cuda", "0 GPUs visible, 1 needed"),
        (1, None, "cuda:2", "1 GPUs visible, 2 needed"),
        (2, None, "cuda:2", None),
        (2, "0", "cuda:2", "1 GPUs visible, 2 needed (CUDA_VISIBLE_DEVICES='0')"),
        (2, "", "cuda", "0 GPUs visible, 1 needed (CUDA_VISIBLE_DEVICES='')"),
        (2, "-1", "nccl", "0 GPUs visible, 1 needed (CUDA_VISIBLE_DEVICES='-1')"),
        (2, "0,1", "nccl", None),
    ],
)
def test_gpus_are_counted_as_a_process_would_see_them(
    elsewhere: Any, nodes: int, chosen: str | None, name: str, told: str | None
) -> None:
    files = {f"dev/nvidia{number}": "" for number in range(nodes)} | {"dev/nvidiactl": "", "torch/lib/libtorch_cuda.so": ""}
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    found = Doctor(elsewhere(files=files, packages={"torch": "2.13.0"}, **environ)).capability(name)
    assert (found.reason if found else None) == told


def test_a_gpu_beside_a_torch_for_cpus_says_so(elsewhere: Any) -> None:
    found = Doctor(elsewhere(files={"dev/nvidia0": "", "torch/x": ""}, packages={"torch": "2.13.0+cpu"})).capability("cuda:1")
    assert found is not None
    assert found.reason == "torch 2.13.0+cpu is built without CUDA"


@pytest.mark.parametrize(
    ("installed", "name", "told"),
    [
        ("2.13.0+cpu", "torch>=2.13", None),
        ("2.13.0+cpu", "torch>=2.9,<2.14", None),
        ("2.14.0.dev20260101", "torch>=2.13", None),
        ("2.13.0+cpu", "torch >= 2.14", "torch is 2.13.0+cpu, >= 2.14 needed"),
        (None, "torch>=2.13", "the Python package torch is not installed"),
    ],
)
def test_versions_are_compared_as_pip_does(elsewhere: Any, installed: str | None, name: str, told: str | None) -> None:
    found = Doctor(elsewhere(packages={"torch": installed} if installed else {})).capability(name)
    assert (found.reason if found else None) == told
    assert isinstance(found, Missing) == (installed is None), "another version was somebody's choice"


@pytest.mark.parametrize(
    ("scope", "caps", "allowed"),
    [(None, 0, True), ("0", 0, True), ("1", 0, False), ("1", 1 << 19, True), ("2", 1 << 19, True), ("3", 1 << 19, False)],
)
def test_attaching_follows_yamas_rule(elsewhere: Any, scope: str | None, caps: int, allowed: bool) -> None:
    files = {"proc/self/status": f"Name:\tx\nCapEff:\t{caps:016x}\n"}
    files |= {"proc/sys/kernel/yama/ptrace_scope": f"{scope}\n"} if scope is not None else {}
    found = Doctor(elsewhere(files=files)).capability("ptrace")
    assert (found is None) == allowed
    assert found is None or f"ptrace_scope={scope}" in found.reason


MOUNTS_V1 = "31 23 0:28 / {root}/cg rw - tmpfs tmpfs rw\n32 31 0:29 / /cg/memory rw - cgroup cgroup rw,memory\n"
MOUNTS_V2 = "31 23 0:28 / /cg rw - cgroup2 cgroup2 rw,nsdelegate\n"


def test_controllers_are_found_in_both_versions(elsewhere: Any) -> None:
    v1 = Doctor(elsewhere(files={"proc/self/mountinfo": MOUNTS_V1, "cg/memory/tasks": ""}))
    assert v1.capability("cgroup-v1") is None
    assert v1.capability("cgroup-memory") is None
    assert v1.capability("cgroup-v2") == Unavailable("cgroup v2 is not mounted")
    assert v1.capability("cgroup-cpu") == Unavailable("no cgroup offers the cpu controller")
    v2 = Doctor(elsewhere(files={"proc/self/mountinfo": MOUNTS_V2, "cg/cgroup.controllers": "cpu pids\n"}))
    assert [v2.capability(f"cgroup-{name}") is None for name in ("v2", "cpu", "freezer", "memory", "v1")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_docker_client_without_a_daemon_is_not_enough(elsewhere: Any, tmp_path: Path) -> None:
    assert isinstance(Doctor(elsewhere()).capability("docker"), Missing)
    tool(tmp_path, "docker")
    found = Doctor(elsewhere()).capability("docker")
    assert found is not None
    assert "no Docker daemon answers on unix:///var/run/docker.sock" in found.reason


def test_programs_and_packages_outside_the_table_can_be_needed(elsewhere: Any, tmp_path: Path) -> None:
    tool(tmp_path, "rsync")
    doctor = Doctor(elsewhere(packages={"ray": "2.60.0"}))
    assert doctor.capability("command:rsync") is None
    assert doctor.capability("package:ray>=2") is None
    assert doctor.capability("package:ray>=3") == Unavailable("ray is 2.60.0, >=3 needed")
    assert doctor.capability("package:ray-x[y]>=3") == Missing(
        "the Python package ray-x is not installed", "pip install 'ray-x[y]>=3'", pip=("ray-x[y]>=3",)
    )


@pytest.mark.needs("root", "veth")
def test_a_trial_leaves_no_device_behind() -> None:
    assert Doctor().capability("veth") is None
    assert not {path.name for path in Path("/sys/class/net").iterdir()} & {"dtp0", "dtp1"}
