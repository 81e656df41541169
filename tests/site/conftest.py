"""A made-up folder of runs, and its pages, for all tests of the site."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dtprobe import site


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """The module `made`, which writes made-up runs."""
    spec = importlib.util.spec_from_file_location("made_runs", Path(__file__).with_name("made.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, made: ModuleType) -> Path:
    """Six nights, then all kinds of damage."""
    out = made.folder(tmp_path_factory.mktemp("made") / "runs")
    made.damage(out)
    return out


@pytest.fixture(scope="module")
def known(runs: Path, made: ModuleType) -> Iterator[site.Known]:
    found = site.read(runs, now_ns=made.FIRST_NS)
    yield found
    found.close()
