"""The arm's program on the host: `measure.py RATE MESSAGES QUEUE:TRAFFIC...` on a real RDMA device where there is one, else in the lab VM."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import device

from dtprobe import record
from dtprobe.errors import DtprobeError
from dtprobe.launch import lab

VM_TIMEOUT_S = 150.0


def main(args: list[str]) -> int:
    real = device.usable(os.environ)
    record("where", place=f"device {real}" if real else "lab VM")
    if real:
        device.measure(real, args[2:], Path(os.environ["DTPROBE_RANK_FOLDER"]))
        return 0
    return lab.worker(Path(__file__).with_name("contend.py"), args, environ=os.environ, timeout_s=VM_TIMEOUT_S)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DtprobeError as error:
        sys.exit(str(error))
