"""What an RDMA device says of itself, as the files that readers know: counters and ibstat. Runs in the lab VM and on a host."""

from __future__ import annotations

import subprocess
from pathlib import Path

DEVICES = Path("/sys/class/infiniband")


def counters(into: Path, name: str) -> None:
    """`NAME.txt`: all counters of all ports, as `grep . /sys/class/infiniband/*/ports/*/*counters/*` prints them."""
    lines = []
    for file in sorted(DEVICES.glob("*/ports/*/*counters/*")):
        try:
            lines.append(f"{file}:{file.read_text(encoding='ascii').strip()}\n")
        except OSError:  # some counters exist and refuse to be read, by device and port type
            continue
    (into / f"{name}.txt").write_text("".join(lines), encoding="ascii")


def ibstat(into: Path, name: str = "ibstat") -> None:
    """`NAME.txt`: what ibstat prints; a reason in its place where it is not installed."""
    try:
        said = subprocess.run(["ibstat"], capture_output=True, text=True, check=False, timeout=30).stdout
    except OSError as error:
        said = f"ibstat: {error.strerror}\n"
    (into / f"{name}.txt").write_text(said, encoding="utf-8")


def cpu() -> tuple[int, int]:
    """Jiffies since boot, all and idle (proc_stat(5))."""
    fields = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]
