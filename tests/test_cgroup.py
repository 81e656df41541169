"""Where a run's cgroup may be made, from the kernel's texts of several kinds of machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtprobe import cgroup
from dtprobe.errors import Unavailable


def mounts(*lines: tuple[str, Path, str, str]) -> str:
    """mountinfo(5) of mounts: root, mount point, file system type, super options."""
    return "\n".join(
        f"30 24 0:26 {root} {point} rw,relatime shared:9 - {kind} none {options}" for root, point, kind, options in lines
    )


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    made = {name: tmp_path / name for name in ("v2", "freezer", "pids")}
    for folder in made.values():
        folder.mkdir()
    return made


def test_v2_below_the_group_of_the_caller(folders: dict[str, Path]) -> None:
    (folders["v2"] / "user.slice" / "mine").mkdir(parents=True)
    place = cgroup.place("x", mountinfo=mounts(("/", folders["v2"], "cgroup2", "rw")), membership="0::/user.slice/mine\n")
    assert place == folders["v2"] / "user.slice" / "mine" / "x"


def test_in_a_container_below_what_its_mount_shows(folders: dict[str, Path]) -> None:
    (folders["v2"] / "job").mkdir()
    text = mounts(("/docker/abc", folders["v2"], "cgroup2", "rw"))
    assert cgroup.place("x", mountinfo=text, membership="0::/docker/abc/job\n") == folders["v2"] / "job" / "x"
    assert cgroup.place("x", mountinfo=text, membership="0::/elsewhere\n") == folders["v2"] / "x"


def test_without_v2_below_a_v1_hierarchy_that_limits_nothing(folders: dict[str, Path]) -> None:
    text = mounts(("/", folders["pids"], "cgroup", "rw,pids"), ("/", folders["freezer"], "cgroup", "rw,freezer"))
    assert cgroup.place("x", mountinfo=text, membership="3:pids:/\n2:freezer:/\n") == folders["freezer"] / "x"


def test_no_cgroup_file_system_is_said() -> None:
    found = cgroup.place("x", mountinfo=mounts(("/", Path("/proc"), "proc", "rw")), membership="0::/\n")
    assert isinstance(found, Unavailable) and "no cgroup file system" in found.reason


def test_what_may_not_be_written_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    found = cgroup.place("x", mountinfo=mounts(("/", gone, "cgroup2", "rw")), membership="0::/\n")
    assert isinstance(found, Unavailable) and str(gone) in found.reason


def test_the_version_is_told_by_the_folder(tmp_path: Path) -> None:
    assert cgroup.version(tmp_path) == 1
    (tmp_path / "cgroup.events").touch()
    assert cgroup.version(tmp_path) == 2
