"""Runs `nfs_guest.py` in the lab VM, with this interpreter's packages shared read-only: the guest's torch is this one."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from dtprobe.launch import lab

TIMEOUT_S = 120.0


def main() -> int:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    packages = Path(found.origin).resolve().parent.parent
    return lab.worker(
        Path(__file__).with_name("nfs_guest.py"),
        sys.argv[1:],
        environ=os.environ,
        timeout_s=TIMEOUT_S,
        shares=(lab.Share(packages, "/packages"),),
    )


if __name__ == "__main__":
    sys.exit(main())
