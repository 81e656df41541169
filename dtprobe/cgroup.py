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
    groups = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    refused = []
    for controller in ("", *TRACKERS):
        if controller not in mounts or controller not in groups:
            continue
        root, mount = mounts[controller]
        # The group as this mount shows it: a container's mount starts at the container's own group.
        relative = os.path.relpath(groups[controller], root) if root != "/" else groups[controller].lstrip("/")
        parent = mount if relative.startswith("..") else mount / relative
        if os.access(parent, os.W_OK | os.X_OK):
            return parent / name
        refused.append(str(parent))
    return Unavailable(f"no permission to make a cgroup below {', '.join(refused) or 'any mounted hierarchy'}", "run as root")


def version(path: Path) -> int:
    """1 or 2: which interface a group's folder has."""
    return 2 if (path / "cgroup.events").exists() else 1


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
