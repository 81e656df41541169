"""The jobs on paper, under one name for all tests of this folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if "flight_jobs" not in sys.modules:
    spec = importlib.util.spec_from_file_location("flight_jobs", Path(__file__).with_name("jobs.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flight_jobs"] = module
    spec.loader.exec_module(module)
