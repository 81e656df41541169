"""The ranks of these tests need DTensor, FSDP2 and pipelines: a zygote that has imported them saves seconds a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_PROGRAM = """
import runpy, sys
import torch.distributed.fsdp, torch.distributed.pipelining, torch.distributed.tensor.parallel
import dtprobe.framework.precision.scaler
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.fixture(scope="session")
def zygote() -> Iterator[subprocess.Popen[str]]:
    """As the zygote of the other tests of the framework, with more imported."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(Path(__file__).parents[1] / "zygote.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)},
        text=True,
        bufsize=1,
    )
    assert process.stdin
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(60)
