"""The distributed tensor framework: parts a training job uses alone, without the harness.

Each part is a submodule (or package) with a `probe() -> Unavailable | None` that says whether it can work here; see
`dtprobe.framework.part`. Importing this package imports none of them, and not torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_FACE = {
    "CheckedGroup": "checked",
    "Every": "consistency",
    "Exchange": "pipeline",
    "Groups": "groups",
    "Job": "bootstrap",
    "MasterSecret": "transport.secure",
    "Placement": "bootstrap",
    "Registry": "transport.serialise",
    "SafeFileStore": "filestore",
    "ScopedGroup": "groups",
    "exchanged": "pipeline",
    "interruptible": "interrupt",
    "require_consistent": "consistency",
    "require_distinct": "consistency",
    "resolve": "bootstrap",
    "secured": "transport.secure",
    "start": "bootstrap",
}
"""Public names -> the submodule each lives in, imported when the name is first asked for."""

__all__ = [
    "CheckedGroup",
    "Every",
    "Exchange",
    "Groups",
    "Job",
    "MasterSecret",
    "Placement",
    "Registry",
    "SafeFileStore",
    "ScopedGroup",
    "exchanged",
    "interruptible",
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
