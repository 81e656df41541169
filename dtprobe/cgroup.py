"""The control group of a run, where the machine allows one: its members die at one stroke, whatever they forked.

Standard library only: the warden runs without site-packages.
"""

from __future__ import annotations

import os
from pathlib import Path

from dtprobe.errors import Unavailable

TRACKERS = ("freezer", "pids")
"""v1 hierarchies that a tracking group may stand in, where there is no v2: they limit nothing until told to."""


def place(name: str, *, mountinfo: str, membership: str) -> Path | Unavailable:
    """Where this process may make a group `name`: below its own group of v2, else of a v1 tracker; or why nowhere.

    `mountinfo` and `membership` are the texts of /proc/self/mountinfo and /proc/self/cgroup. Nothing is made.
    """
    mounts = _mounts(mountinfo)
    if not mounts:
        return Unavailable("no cgroup file system is mounted", "mount -t cgroup2 none /sys/fs/cgroup")
    groups = _groups(membership)
    refused = []
    for controller in ("", *TRACKERS):
        if controller not in mounts or controller not in groups:
            continue
        parent = _own(mounts[controller], groups[controller])
        if os.access(parent, os.W_OK | os.X_OK):
            return parent / name
        refused.append(str(parent))
    return Unavailable(f"no permission to make a cgroup below {', '.join(refused) or 'any mounted hierarchy'}", "run as root")


def limiting(name: str, controller: str, *, mountinfo: str, membership: str) -> Path | Unavailable:
    """Where this process may make a group `name` that `controller` limits, or why nowhere. Nothing is made.

    v1: below its own group. v2: below the nearest group at or above its own that hands the controller to its children; a group
    with processes of its own cannot begin to (the rule of no internal processes, cgroups(7)).
    """
    mounts, groups = _mounts(mountinfo), _groups(membership)
    refused = []
    if controller in mounts and controller in groups:
        parent = _own(mounts[controller], groups[controller])
        if os.access(parent, os.W_OK | os.X_OK):
            return parent / name
        refused.append(str(parent))
    if "" in mounts and "" in groups:
        top, own = mounts[""][1], _own(mounts[""], groups[""])
        for parent in (own, *own.parents):
            control = parent / "cgroup.subtree_control"
            if control.exists() and controller in control.read_text(encoding="ascii").split():
                if os.access(parent, os.W_OK | os.X_OK):
                    return parent / name
                refused.append(str(parent))
            if parent == top:
                break
    if refused:
        return Unavailable(f"no permission to make a cgroup for {controller} below {', '.join(refused)}", "run as root")
    return Unavailable(
        f"no cgroup hands the {controller} controller to its children",
        f"echo +{controller} > cgroup.subtree_control of a group without processes, or systemd-run --scope -p Delegate=yes",
    )


def version(path: Path) -> int:
    """1 or 2: which interface a group's folder has."""
    return 2 if (path / "cgroup.events").exists() else 1


def _groups(membership: str) -> dict[str, str]:
    """Controller ("" for v2) -> this process's group. Format: cgroups(7), /proc/PID/cgroup."""
    groups = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def _own(mount: tuple[str, Path], group: str) -> Path:
    """The group's folder as this mount shows it: a container's mount starts at the container's own group."""
    root, point = mount
    relative = os.path.relpath(group, root) if root != "/" else group.lstrip("/")
    return point if relative.startswith("..") else point / relative


def _mounts(mountinfo: str) -> dict[str, tuple[str, Path]]:
    """Controller ("" for v2) -> root of the mount within the hierarchy, mount point. Format: proc(5)."""
    found = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, point = left.split()[3:5]
        if kind == "cgroup2":
            found[""] = (root, Path(point))
        elif kind == "cgroup":
            for option in options.split(","):
                found.setdefault(option, (root, Path(point)))
    return found
