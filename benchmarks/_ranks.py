"""A benchmark's own program once for each rank on this host, over loopback: started, measured in turns, and what they print collected."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def free_port() -> int:
    """A port of loopback that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def outputs(
    program: str, size: int, words: Sequence[str] = (), *, environ: Mapping[str, str] | None = None, timeout_s: float = 600
) -> list[str]:
    """What each of `size` ranks of `program` printed, in order of rank; ends this process where one failed."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **(environ or {}),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, program, *words], env=os.environ | common | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    try:
        printed = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        sys.exit("a rank failed")
    return printed


def timed(call: Callable[[], object], calls: int = 1) -> tuple[float, float]:
    """Wall clock and processor time of this rank, seconds a call, from a moment at which all ranks begin."""
    import torch.distributed as dist

    dist.barrier()
    begun, used = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begun) / calls, (time.process_time() - used) / calls


def interleaved(
    works: Mapping[str, Mapping[str, Callable[[], object]]], rounds: int, calls: int = 1
) -> list[dict[str, dict[str, float]]]:
    """Every kind of every work once a round, in turn: work -> kind -> seconds a call, a dict a round. One round before warms up."""
    found = []
    for number in range(rounds + 1):
        times = {work: {kind: timed(call, calls)[0] for kind, call in kinds.items()} for work, kinds in works.items()}
        if number:
            found.append(times)
    return found


def tell(found: Any) -> None:
    """Rank 0 prints what was found, as JSON; then the job ends."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
