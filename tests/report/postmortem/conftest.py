"""The made-up diagnoses, for all tests of the incident note."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def diagnoses() -> ModuleType:
    """The module `diagnoses`, whose functions each make one."""
    spec = importlib.util.spec_from_file_location("report_diagnoses", Path(__file__).with_name("diagnoses.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
