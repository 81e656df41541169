"""Pipeline exchange: micro-batches between stages as batched, ordered, tagged messages that name the stage they wait for.

with Exchange(groups.create("pipeline"), timeout_s=60) as exchange:
    stage = exchanged(PipelineStage(model, index, stages, device), exchange)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dtprobe.framework.part import torch_distributed as probe

if TYPE_CHECKING:
    from dtprobe.framework.pipeline.errors import BufferBusy, MessageMismatch, StageError, StageLost, StageTimeout
    from dtprobe.framework.pipeline.exchange import Exchange
    from dtprobe.framework.pipeline.handle import Handle
    from dtprobe.framework.pipeline.messages import Transfer
    from dtprobe.framework.pipeline.stage import exchanged

__all__ = [
    "BufferBusy",
    "Exchange",
    "Handle",
    "MessageMismatch",
    "StageError",
    "StageLost",
    "StageTimeout",
    "Transfer",
    "exchanged",
    "probe",
]

_LATER = {
    "BufferBusy": "errors",
    "Exchange": "exchange",
    "Handle": "handle",
    "MessageMismatch": "errors",
    "StageError": "errors",
    "StageLost": "errors",
    "StageTimeout": "errors",
    "Transfer": "messages",
    "exchanged": "stage",
}


def __getattr__(name: str) -> Any:
    """What needs torch is imported when first asked for, and torch's pipelining only with `exchanged`."""
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
