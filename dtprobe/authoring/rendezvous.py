"""How a scenario's worker joins its group: a long wait for the ranks to come, and a short timeout for what follows.

`init_process_group(timeout=...)` uses one timeout for both. A scenario wants collectives that give up after seconds, but on a
busy machine ranks may need longer than that to import torch. torch is imported when a function is called.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

COME_S = 60.0
"""For so long the ranks wait for each other at the store."""


def join(
    timeout_s: float, *, device: str = "cpu", store: dist.Store | None = None, environ: Mapping[str, str] = os.environ
) -> int:
    """Make the default group of the launcher's ranks, gloo for `cpu` and NCCL for `cuda`, and return this rank.

    `timeout_s` is the timeout of the group's collectives (seconds). `store` (default: a TCPStore that rank 0 serves at
    MASTER_ADDR and MASTER_PORT) is where the ranks meet. With NCCL this rank's device becomes the current one.
    """
    import torch
    import torch.distributed as dist

    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(int(environ.get("LOCAL_RANK", "0")))
    if store is None:
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, world_size, rank == 0, timeout=timedelta(seconds=COME_S))
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
    return rank
