"""A worker without torch, which says what version of it is installed."""

from __future__ import annotations

import sys
from importlib import metadata

from dtprobe import record


def main() -> None:
    minor = int(metadata.version("torch").split(".")[1])
    record("leak", value=float(sys.argv[1] == "fault" and minor < 12))


main()
