"""Undo steps on real things, each also done twice and for a thing that never came to be."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtprobe import processes, undo

SLEEP = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)")
PATIENCE_S = 60.0
MS_BIND = 4096


@pytest.fixture
def name() -> str:
    """A name no longer than an interface's may be (15 characters)."""
    return f"dt{uuid.uuid4().hex[:8]}"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    one = subprocess.Popen(SLEEP)
    yield one
    one.kill()
    one.wait()


def bind(source: Path, target: Path) -> None:
    target.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(os.fsencode(source), os.fsencode(target), None, MS_BIND, None) == 0, os.strerror(ctypes.get_errno())


def undo_twice(kind: str, **data: object) -> None:
    """Undo, see that nothing remains, and undo what is gone."""
    undo.undo(kind, data)
    assert undo.remaining(kind, data) is None
    undo.undo(kind, data)


@pytest.mark.parametrize("kind", undo.KINDS)
def test_every_kind_has_its_fields_declared_and_is_refused_without(kind: str) -> None:
    missing = undo.conflict(kind, {})
    assert missing is None if not undo.FIELDS[kind] else missing is not None and undo.FIELDS[kind][0] in missing


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("temp_dir", {"path": "/nowhere/x"}),
        ("file", {"path": "/nowhere/x"}),
        ("mount", {"path": "/nowhere/x"}),
        ("netns", {"name": "dtnowhere"}),
        ("link", {"name": "dtnowhere"}),
        ("link", {"name": "dtnowhere", "netns": "dtnowhere"}),
        ("cgroup", {"path": "/nowhere/x"}),
        ("shm", {"name": "dtnowhere"}),
        ("process", {"pid": 1, "start": -1}),
    ],
)
def test_a_thing_that_never_came_to_be_is_undone_in_silence(kind: str, data: dict[str, object]) -> None:
    undo.undo(kind, data)


def test_a_link_in_a_temp_dir_is_removed_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / "link").symlink_to(precious)
    undo_twice("temp_dir", path=str(folder))
    assert (precious / "file").exists()


def test_a_temp_dir_that_became_a_link_is_left_and_said(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "scratch").symlink_to(tmp_path / "precious")
    with pytest.raises(undo.UndoError, match="it is no longer a folder"):
        undo.undo("temp_dir", {"path": str(tmp_path / "scratch")})
    assert (tmp_path / "precious").exists()


@pytest.mark.needs("root")
def test_what_is_mounted_inside_a_temp_dir_is_unmounted_and_not_deleted(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    folder = tmp_path / "scratch"
    folder.mkdir()
    bind(precious, folder / "with space")
    undo_twice("temp_dir", path=str(folder))
    assert (precious / "file").exists()


@pytest.mark.needs("root")
def test_a_mount_in_use_is_taken_down(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").touch()
    target = tmp_path / "target"
    assert undo.conflict("mount", {"path": str(target)}) is None
    bind(source, target)
    assert undo.remaining("mount", {"path": str(target)}) == f"mount {target}"
    assert "is mounted on" in (undo.conflict("mount", {"path": str(target)}) or "")
    with (target / "file").open():
        undo_twice("mount", path=str(target))
    assert list(target.iterdir()) == []


@pytest.mark.needs("netns")
def test_a_namespace_and_its_link_are_taken_down(name: str) -> None:
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name], check=True)
    try:
        assert undo.remaining("link", {"name": f"{name}a"}) == f"link {name}a"
        assert "exists already" in (undo.conflict("netns", {"name": name}) or "")
        undo.undo("link", {"name": f"{name}b", "netns": name})
        assert undo.remaining("link", {"name": f"{name}a"}) is None  # the other end goes with it
        undo_twice("link", name=f"{name}a")
        undo_twice("netns", name=name)
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.needs("root")
@pytest.mark.parametrize("hierarchy", ["unified", "freezer", "pids", "."])
def test_a_cgroup_goes_with_its_members_and_those_below(name: str, hierarchy: str, sleeper: subprocess.Popen[bytes]) -> None:
    parent = Path("/sys/fs/cgroup", hierarchy)
    if not (parent / "cgroup.procs").exists() or not os.access(parent, os.W_OK):
        pytest.skip(f"no cgroup hierarchy at {parent}")
    top = parent / name
    (top / "inner").mkdir(parents=True)
    (top / "inner" / "cgroup.procs").write_text(str(sleeper.pid))
    if hierarchy == "freezer":
        (top / "freezer.state").write_text("FROZEN")
    # Its parent must wait for it before the group is empty: here that is this process.
    undo.kill_cgroup(top)
    assert sleeper.wait(PATIENCE_S) == -signal.SIGKILL
    undo_twice("cgroup", path=str(top))


def test_a_process_is_ended_only_under_its_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    found = processes.identity(sleeper.pid)
    assert found is not None
    undo.undo("process", {"pid": found.pid, "start": found.start + 1})
    assert sleeper.poll() is None
    assert f"process {found.pid}" in (undo.remaining("process", found._asdict()) or "")
    undo.undo("process", found._asdict())
    assert sleeper.wait(PATIENCE_S) == -signal.SIGKILL


def test_segments_of_a_living_process_stay(name: str, sleeper: subprocess.Popen[bytes]) -> None:
    segment = undo.SHM / f"torch_{sleeper.pid}_{name}_0"
    segment.touch()
    try:
        undo.undo("shm", {"pid": sleeper.pid})
        assert segment.exists()
        sleeper.kill()
        sleeper.wait()
        undo_twice("shm", pid=sleeper.pid)
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)


@pytest.mark.parametrize(("argv", "why"), [(["false"], "exit 1"), (["/nowhere/x"], "No such file")])
def test_a_command_that_fails_is_said(argv: list[str], why: str) -> None:
    with pytest.raises(undo.UndoError, match=why):
        undo.undo("command", {"argv": argv})
