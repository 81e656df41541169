"""The distributed tensor framework: parts a training job uses alone, without the harness.

Each part is a submodule (or package) with a `probe() -> Unavailable | None` that says whether it can work here; see
`dtprobe.framework.part`. Importing this package imports none of them, and not torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_FACE = {
    "CheckedGroup": "checked",
    "ConsistentScaler": "precision",
    "Every": "consistency",
    "Exchange": "pipeline",
    "GradientLoss": "precision",
    "Groups": "groups",
    "Job": "bootstrap",
    "MasterSecret": "transport.secure",
    "Placement": "bootstrap",
    "ReductionAudit": "precision",
    "Registry": "transport.serialise",
    "SafeFileStore": "filestore",
    "ScalerDiverged": "precision",
    "ScopedGroup": "groups",
    "UnsoundBuffer": "precision",
    "audit": "precision",
    "exchanged": "pipeline",
    "guarded": "precision",
    "interruptible": "interrupt",
    "reduce_in_fp32": "precision",
    "require_consistent": "consistency",
    "require_distinct": "consistency",
    "resolve": "bootstrap",
    "secured": "transport.secure",
    "start": "bootstrap",
}
"""Public names -> the submodule each lives in, imported when the name is first asked for."""

__all__ = [
    "CheckedGroup",
    "ConsistentScaler",
    "Every",
    "Exchange",
    "GradientLoss",
    "Groups",
    "Job",
    "MasterSecret",
    "Placement",
    "ReductionAudit",
    "Registry",
    "SafeFileStore",
    "ScalerDiverged",
    "ScopedGroup",
    "UnsoundBuffer",
    "audit",
    "exchanged",
    "guarded",
    "interruptible",
    "reduce_in_fp32",
    "require_consistent",
    "require_distinct",
    "resolve",
    "secured",
    "start",
]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FACE[name]}"), name)
