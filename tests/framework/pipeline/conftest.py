"""The zygote of these tests has imported torch's pipelining, too: that takes each rank seconds otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_PROGRAM = "import runpy, sys, dtprobe.framework.pipeline.stage; runpy.run_path(sys.argv[1], run_name='__main__')"


@pytest.fixture(scope="session")
def zygote() -> Iterator[subprocess.Popen[str]]:
    """In the place of the framework's own, which the `job` fixture talks to."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(Path(__file__).parents[1] / "zygote.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"},
        text=True,
        bufsize=1,
    )
    assert process.stdin
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(60)
