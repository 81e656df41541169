"""The arm's program on the host for the variants that lose a peer or a link: always in the lab VM, whatever devices there are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dtprobe.errors import DtprobeError
from dtprobe.launch import lab

if __name__ == "__main__":
    try:
        sys.exit(lab.worker(Path(__file__).with_name("losses.py"), sys.argv[1:], environ=os.environ, timeout_s=120.0))
    except DtprobeError as error:
        sys.exit(str(error))
