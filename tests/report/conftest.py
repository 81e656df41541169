"""The builders of made-up run folders, for all tests of the report."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def samples() -> ModuleType:
    """The module `samples`, whose functions each write one made-up run folder."""
    spec = importlib.util.spec_from_file_location("report_samples", Path(__file__).with_name("samples.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
