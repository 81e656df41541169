"""One control group that limits one thing, v1 or v2."""

from __future__ import annotations

import re
from pathlib import Path

from dtprobe import cgroup, processes
from dtprobe.confine import Confinement
from dtprobe.errors import Unavailable

PERIOD_US = 100_000


def place(name: str, what: str) -> Path | Unavailable:
    """Where the group would be, or why it cannot be."""
    return cgroup.limiting(
        name,
        what,
        mountinfo=Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"),
        membership=Path("/proc/self/cgroup").read_text(encoding="utf-8"),
    )


class Group:
    """A group of ours, announced to the ledger before it is made; `amount` is bytes, cores, a list of cpus, or a count."""

    def __init__(self, box: Confinement, path: Path, what: str, amount: str) -> None:
        self.path = path
        self.what = what
        box.undo("cgroup", path=str(path))
        path.mkdir()
        self.version = cgroup.version(path)
        if what == "cpuset" and self.version == 1:  # a group without memory nodes takes no process
            self._write("cpuset.mems", self._parent("cpuset.mems"))
        self.set = self._limit(amount)

    def join(self, pid: int) -> None:
        """The process with its threads, and everything that descends from it now or later."""
        for one in (pid, *(child.pid for child in processes.descendants(pid))):
            try:
                self._write("cgroup.procs", str(one))
            except ProcessLookupError:  # it ended meanwhile
                continue

    def lift(self) -> None:
        """No limit any more; members stay."""
        if not self.path.is_dir():
            return
        match self.what, self.version:
            case "memory", 1:
                if (self.path / "memory.memsw.limit_in_bytes").exists():
                    self._write("memory.memsw.limit_in_bytes", "-1")
                self._write("memory.limit_in_bytes", "-1")
            case "memory", _:
                self._write("memory.max", "max")
            case "cpu", 1:
                self._write("cpu.cfs_quota_us", "-1")
            case "cpu", _:
                self._write("cpu.max", f"max {PERIOD_US}")
            case "cpuset", _:
                self._write("cpuset.cpus", self._parent("cpuset.cpus"))
            case _:
                self._write("pids.max", "max")

    def effect(self) -> str:
        """What the kernel counted, in words."""
        match self.what, self.version:
            case "memory", 1:
                return f"{self._count('memory.oom_control', 'oom_kill')} OOM kills"
            case "memory", _:
                return f"{self._count('memory.events', 'oom_kill')} OOM kills"
            case "cpu", _:
                return f"throttled {self._count('cpu.stat', 'nr_throttled')} times"
            case "pids", _:
                return f"{self._count('pids.events', 'max')} forks refused"
            case _:
                return ""

    def _limit(self, amount: str) -> str:
        """Set it; what was set, in words."""
        match self.what, self.version:
            case "memory", 1:
                self._write("memory.limit_in_bytes", amount)
                if (self.path / "memory.memsw.limit_in_bytes").exists():
                    self._write("memory.memsw.limit_in_bytes", amount)
                return f"cgroup v1 memory.limit_in_bytes={amount}"
            case "memory", _:
                self._write("memory.max", amount)
                if (self.path / "memory.swap.max").exists():
                    self._write("memory.swap.max", "0")
                return f"cgroup v2 memory.max={amount}"
            case "cpu", version:
                quota = round(float(amount) * PERIOD_US)
                if version == 1:
                    self._write("cpu.cfs_period_us", str(PERIOD_US))
                    self._write("cpu.cfs_quota_us", str(quota))
                    return f"cgroup v1 cpu.cfs_quota_us={quota} of {PERIOD_US}"
                self._write("cpu.max", f"{quota} {PERIOD_US}")
                return f"cgroup v2 cpu.max={quota} {PERIOD_US}"
            case name, version:
                file = "cpuset.cpus" if name == "cpuset" else "pids.max"
                self._write(file, amount)
                return f"cgroup v{version} {file}={amount}"

    def _write(self, file: str, text: str) -> None:
        (self.path / file).write_text(text, encoding="ascii")

    def _parent(self, file: str) -> str:
        """What the parent group has; empty in v2 means that it has all."""
        path = self.path.parent / file
        return path.read_text(encoding="ascii").strip() if path.exists() else ""

    def _count(self, file: str, name: str) -> int:
        path = self.path / file
        found = re.search(rf"^{name} (\d+)$", path.read_text(encoding="ascii"), re.MULTILINE) if path.exists() else None
        return int(found[1]) if found else 0
