"""Bootstrap: where this process stands, a store, a verified job, groups, in this order and with a deadline."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dtprobe.framework.bootstrap.placement import Placement, PlacementError, resolve
from dtprobe.framework.part import torch_distributed as probe

if TYPE_CHECKING:
    from dtprobe.framework.bootstrap.identity import Peer, verify
    from dtprobe.framework.bootstrap.job import Job, start

__all__ = ["Job", "Peer", "Placement", "PlacementError", "probe", "resolve", "start", "verify"]

_LATER = {"Job": "job", "start": "job", "Peer": "identity", "verify": "identity"}


def __getattr__(name: str) -> Any:
    """What needs torch is imported when first asked for: `resolve` works without it."""
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
