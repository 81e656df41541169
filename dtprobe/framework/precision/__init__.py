"""Precision across ranks: one decision of the scaler for the whole job, reduction in float32, sound buffers, an audit of gradients."""

from __future__ import annotations

import importlib
from typing import Any

from dtprobe.errors import Unavailable
from dtprobe.framework.part import torch_distributed

_FACE = {
    "ConsistentScaler": "scaler",
    "GradientLoss": "auditing",
    "ReductionAudit": "auditing",
    "Report": "auditing",
    "ScalerDiverged": "scaler",
    "UnsoundBuffer": "buffers",
    "audit": "auditing",
    "guarded": "buffers",
    "reduce_in_fp32": "reduction",
}
"""Public names -> the submodule each lives in, imported when the name is first asked for."""

__all__ = [
    "ConsistentScaler",
    "GradientLoss",
    "ReductionAudit",
    "Report",
    "ScalerDiverged",
    "UnsoundBuffer",
    "audit",
    "guarded",
    "probe",
    "reduce_in_fp32",
]


def probe() -> Unavailable | None:
    """None where torch.distributed was built in."""
    return torch_distributed()


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FACE[name]}"), name)
