"""Encrypted process groups: what ranks send each other over gloo travels as AES-256-GCM records.

    with secured(MasterSecret.from_environment(os.environ)):
        main()  # unmodified: init_process_group("gloo"), DDP, all_reduce, send, recv, new_group

or, for a script that knows nothing of it, `torchrun ... -m dtprobe.framework.transport.secure run train.py`.

What an eavesdropper still sees: sizes, times, who talks to whom, and the traffic of the store. What someone who can change
traffic can still do: stop it. Tensors on a GPU, NCCL, RPC and the store are not covered; the first is refused, the others need
network encryption below. Whoever has the master secret and a recording of the handshake can read the recording.

Modules, from the pure core outwards: `records` (sealing and opening), `session` (keys), `handshake`, `wire` (point-to-point),
`collectives`, `group` (the process group), `cover` (putting it in front).
"""

from __future__ import annotations

import importlib
from typing import Any

from dtprobe.errors import Unavailable
from dtprobe.framework.part import package, torch_distributed

_FACE = {
    "Channel": "session",
    "Description": "records",
    "ForkedSealer": "errors",
    "HandshakeFailed": "errors",
    "MasterSecret": "secret",
    "Mismatched": "errors",
    "NotCovered": "errors",
    "Opener": "records",
    "OutOfOrder": "errors",
    "PeerSilent": "errors",
    "RecordError": "errors",
    "Replayed": "errors",
    "Rotation": "records",
    "Sealer": "records",
    "SecretRefused": "errors",
    "SecureGroup": "group",
    "Session": "session",
    "Tampered": "errors",
    "Truncated": "errors",
    "WrongChannel": "errors",
    "WrongEpoch": "errors",
    "WrongSecret": "errors",
    "secured": "cover",
}

__all__ = list(_FACE)


def probe() -> Unavailable | None:
    """None where torch.distributed and a cryptography that can write into a given buffer (47 and later) are installed."""
    return torch_distributed() or package("cryptography>=47", extra="secure")


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FACE[name]}"), name)
