"""Undoing what a run did to the machine: a table of small functions, one for each kind of thing.

An entry is announced to the ledger before its thing is made, so that no instant exists at which the thing is there and
nobody knows. Hence every function here is content with a thing that never came to be, and `conflict` refuses an
announcement of something that exists already: what stood there before the run is not ours to remove.
Standard library only: the warden runs without site-packages. A new kind is one more function in `KINDS`.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dtprobe import processes

MNT_DETACH = 2
COMMAND_TIMEOUT_S = 10.0
SHM = Path("/dev/shm")
NETNS = Path("/run/netns")

Data = Mapping[str, Any]


class UndoError(Exception):
    """Something could not be undone; the message says what and why."""


def conflict(kind: str, data: Data) -> str | None:
    """Why this may not be announced (unknown kind, missing field, or a thing that exists already), else None."""
    if kind not in KINDS:
        return f"unknown kind {kind!r}: one of {', '.join(KINDS)}"
    missing = [name for name in FIELDS[kind] if name not in data]
    if missing:
        return f"{kind}: missing {', '.join(missing)}"
    if kind in ("temp_dir", "file", "cgroup") and os.path.lexists(data["path"]):
        return f"{kind}: {data['path']} exists already, so it is not this run's to remove"
    if kind == "netns" and (NETNS / data["name"]).exists():
        return f"netns: {data['name']} exists already, so it is not this run's to remove"
    if kind == "link" and not data.get("netns") and Path("/sys/class/net", data["name"]).exists():
        return f"link: {data['name']} exists already, so it is not this run's to remove"
    if kind == "mount" and mounted(Path(data["path"])):
        return f"mount: something is mounted on {data['path']} already, so it is not this run's to unmount"
    return None


def undo(kind: str, data: Data) -> None:
    """Undo one entry; done again, or for a thing that never came to be, it does nothing. Raises UndoError."""
    try:
        KINDS[kind](data)
    except (OSError, subprocess.SubprocessError) as error:
        raise UndoError(f"{kind} {_subject(data)}: {error}") from error


def remaining(kind: str, data: Data) -> str | None:
    """What of the entry is still there, in words, or None. `command` entries cannot be looked at: their argv is named."""
    match kind:
        case "temp_dir" | "file" | "cgroup":
            return f"{kind} {data['path']}" if os.path.lexists(data["path"]) else None
        case "mount":
            return f"mount {data['path']}" if mounted(Path(data["path"])) else None
        case "netns":
            return f"netns {data['name']}" if (NETNS / data["name"]).exists() else None
        case "link":
            there = data.get("netns") or Path("/sys/class/net", data["name"]).exists()
            return f"link {data['name']}" if there else None
        case "process":
            who = processes.Identity(data["pid"], data["start"])
            found = processes.read(who.pid)
            return processes.describe(found) if found and who.alive() else None
        case "shm":
            left = segments(data)
            return f"shared memory {', '.join(path.name for path in left)}" if left else None
        case _:
            return f"{kind} {_subject(data)}"


def mount_points(under: Path) -> list[str]:
    """Mount points at or below a path, deepest and latest first, as the kernel lists them."""
    found = []
    top = _canonical(under)
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        # proc(5): white space and backslashes are octal escapes.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), line.split()[4])
        if point == top or point.startswith(top + "/"):
            found.append(point)
    return found[::-1]


def mounted(path: Path) -> bool:
    """Whether something is mounted on exactly this path."""
    return _canonical(path) in mount_points(path)


def _canonical(path: Path) -> str:
    """The path without symbolic links, found without touching its last part: a stat of a dead FUSE mount hangs."""
    return str(path.parent.resolve() / path.name)


def segments(data: Data) -> list[Path]:
    """Shared-memory segments of an entry that are there: the one named, or all that torch made in the process `pid`.

    torch names them `torch_<pid>_<random>_<count>` (torch/csrc/StorageSharing.cpp, NewProcessWideShmHandle). A pid that
    lives is skipped: then the segments are in use, or somebody else's.
    """
    if "name" in data:
        path = SHM / data["name"]
        return [path] if path.exists() else []
    if processes.running(data["pid"]):
        return []
    return [path for path in SHM.glob(f"torch_{data['pid']}_*") if path.lstat().st_uid == os.geteuid()]


def _temp_dir(data: Data) -> None:
    path = Path(data["path"])
    if not os.path.lexists(path):
        return
    # A mount left inside would have its contents deleted with the folder; what cannot be unmounted stays, and is said.
    for point in mount_points(path):
        _unmount(point)
    if not path.is_dir() or path.is_symlink():
        raise UndoError(f"temp_dir {path}: it is no longer a folder")

    try:
        shutil.rmtree(path)
    except PermissionError:
        # A worker made a folder read-only: root does not meet this, others do.
        path.chmod(0o700)
        for folder, names, _ in os.walk(path):
            for name in names:
                if not (inner := Path(folder, name)).is_symlink():
                    inner.chmod(0o700)
        shutil.rmtree(path)


def _file(data: Data) -> None:
    Path(data["path"]).unlink(missing_ok=True)


def _mount(data: Data) -> None:
    for point in mount_points(Path(data["path"])):
        _unmount(point)


def _unmount(point: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # Lazily at once: an unmount that waits for a dead FUSE server would hold the warden.
    if libc.umount2(os.fsencode(point), MNT_DETACH) == 0:
        return
    code = ctypes.get_errno()
    helper = shutil.which("fusermount3") or shutil.which("fusermount")
    if code == 1 and helper:  # EPERM: a FUSE mount of a user without root is taken down by the set-uid helper
        _run([helper, "-u", "-z", point])
        return
    if mounted(Path(point)):
        raise OSError(code, os.strerror(code), point)


def _netns(data: Data) -> None:
    path = NETNS / data["name"]
    if not path.exists():
        return
    if mounted(path):
        _unmount(str(path))
    path.unlink(missing_ok=True)


def _link(data: Data) -> None:
    where = ["-n", data["netns"]] if data.get("netns") else []
    if remaining("link", data) is None or (where and not (NETNS / data["netns"]).exists()):
        return
    done = subprocess.run(
        ["ip", *where, "link", "delete", data["name"]],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode and "Cannot find device" not in done.stderr:
        raise UndoError(f"link {data['name']}: {done.stderr.strip()}")


def _cgroup(data: Data) -> None:
    top = Path(data["path"])
    if not top.is_dir():
        return
    give_up = time.monotonic() + 2
    while True:
        kill_cgroup(top)
        try:
            for folder, _, _ in os.walk(top, topdown=False):
                Path(folder).rmdir()
            return
        except OSError:  # EBUSY until the last member has been reaped
            if time.monotonic() > give_up:
                raise
            time.sleep(0.01)


def kill_cgroup(top: Path) -> None:
    """SIGKILL all members of a cgroup and of those below it; at one stroke where the kernel offers `cgroup.kill` (v2, 5.14)."""
    if (top / "cgroup.kill").exists():
        (top / "cgroup.kill").write_text("1", encoding="ascii")
        return
    for folder, _, _ in os.walk(top):
        for pid in map(int, Path(folder, "cgroup.procs").read_text(encoding="ascii").split()):
            if (who := processes.identity(pid)) is not None:
                processes.send(who, signal.SIGKILL)
    # A frozen member dies only when it thaws.
    if (top / "freezer.state").exists():
        (top / "freezer.state").write_text("THAWED", encoding="ascii")


def _shm(data: Data) -> None:
    for path in segments(data):
        if not stat.S_ISLNK(path.lstat().st_mode):
            path.unlink(missing_ok=True)


def _process(data: Data) -> None:
    processes.send(processes.Identity(data["pid"], data["start"]), signal.SIGKILL)


def _command(data: Data) -> None:
    _run(data["argv"])


def _run(argv: list[str]) -> None:
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise UndoError(f"command {' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()[-300:]}")


def _subject(data: Data) -> str:
    return str(data.get("path") or data.get("name") or data.get("pid") or " ".join(data.get("argv", ())))


KINDS: Mapping[str, Callable[[Data], None]] = {
    "temp_dir": _temp_dir,
    "file": _file,
    "mount": _mount,
    "netns": _netns,
    "link": _link,
    "cgroup": _cgroup,
    "shm": _shm,
    "process": _process,
    "command": _command,
}
"""Kind -> how it is undone."""

LASTING = ("temp_dir", "file")
"""Kinds whose things outlive a restart of the machine; the others are state of the running kernel, and gone with it."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    "temp_dir": ("path",),
    "file": ("path",),
    "mount": ("path",),
    "netns": ("name",),
    "link": ("name",),
    "cgroup": ("path",),
    "shm": (),
    "process": ("pid", "start"),
    "command": ("argv",),
}
"""Kind -> the fields that an entry must have; `link` may name its `netns`, `shm` has `name` or `pid`."""
