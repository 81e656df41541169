"""The builders and services of the tests of signals, for what lies in reports/."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def kit():
    """The module `kit` of the tests of signals."""
    spec = importlib.util.spec_from_file_location("signals_kit", REPO / "tests" / "signals" / "kit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def reports():
    """The folder reports/."""
    return REPO / "reports"


@pytest.fixture
def rich(kit):
    """A summary with something of everything that a rule or a panel asks for."""
    rows = [
        kit.row(f"{status}-one", status, runs=[{}] * 3)
        for status in ("as-expected", "not-as-expected", "flaky", "broken", "failed")
    ]
    return kit.summary(*rows, regressions=[kit.regression("broken-one")], budget_s=500)
