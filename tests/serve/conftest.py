"""Made-up runs and a real server process, for all tests of the live pages."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """The module that writes made-up runs, which the static site's tests use too."""
    path = Path(__file__).parents[1] / "site" / "made.py"
    spec = importlib.util.spec_from_file_location("made_runs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def serving(out: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`dtprobe serve` on a free port: its address, and the process."""
    command = [sys.executable, "-m", "dtprobe", "serve", "--out", str(out), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address, process.communicate()[1]
            yield address, process
        finally:
            process.terminate()
            process.communicate(timeout=20)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, made: ModuleType) -> Path:
    out = made.folder(tmp_path_factory.mktemp("made") / "runs")
    made.damage(out)
    return out


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[str]:
    """The address of a server on loopback, without a token."""
    with serving(runs) as (address, _):
        yield address


@pytest.fixture(scope="session")
def serve():
    return serving
