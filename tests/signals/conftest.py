"""The builders of summaries, and services, for the tests of signals."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def kit():
    """The module `kit`."""
    spec = importlib.util.spec_from_file_location("signals_kit", Path(__file__).with_name("kit.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
