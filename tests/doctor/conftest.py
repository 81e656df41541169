"""What the tests of the cluster's doctor share with those of the framework: forked ranks and a Slurm of two nodes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_TESTS = Path(__file__).parents[1]


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_ranks = _load("doctor_ranks", _TESTS / "framework" / "conftest.py")
_slurm = _load("doctor_slurm", _TESTS / "framework" / "bootstrap" / "conftest.py")

_clean = _ranks.clean_environment
# torch reads this when it is imported, which the zygote does before the command can set it, as it does for itself otherwise
_ranks.clean_environment = lambda: _clean() | {"TORCH_CPP_LOG_LEVEL": "ERROR"}

job, zygote, port, clean_environment = _ranks.job, _ranks.zygote, _ranks.port, _ranks.clean_environment
slurm = _slurm.slurm
