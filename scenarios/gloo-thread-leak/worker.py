"""Process groups made and ended over and over, with or without something that still refers to them.

Modes: `dropped` lets every reference go before the group is destroyed, `kept` keeps one reference a cycle after
`destroy_process_group`, `scoped` keeps the same references but makes the groups with `dtprobe.framework.groups`.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --mode kept`
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtprobe import record

TIMEOUT = timedelta(seconds=20)
ALL_REDUCES = 100
REST_S = 0.2
"""How long the worker holds still for whoever counts its threads, descriptors and mappings from outside."""


class Maker(Protocol):
    """How a group is made and ended."""

    def make(self) -> dist.ProcessGroup: ...

    def end(self, group: dist.ProcessGroup) -> None: ...


class Plain:
    """torch's own calls."""

    def make(self) -> dist.ProcessGroup:
        return dist.new_group(timeout=TIMEOUT)

    def end(self, group: dist.ProcessGroup) -> None:
        dist.destroy_process_group(group)


class Scoped:
    """The framework's registry of groups."""

    def __init__(self) -> None:
        from dtprobe.framework.groups import Groups

        self._groups = Groups(timeout_s=TIMEOUT.total_seconds())
        self._made = 0

    def make(self) -> dist.ProcessGroup:
        self._made += 1
        return self._groups.create(f"cycle-{self._made}")

    def end(self, group: Any) -> None:
        self._groups.end(group.label)


class Cycles:
    """One use of a group for each kind of reference that outlives it; every method returns that reference."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._data = torch.ones(1024, device=device)

    def group_handle(self, group: dist.ProcessGroup) -> object:
        dist.all_reduce(self._data, group=group)
        return group

    def work(self, group: dist.ProcessGroup) -> object:
        work = dist.all_reduce(self._data, group=group, async_op=True)
        work.wait()
        return work

    def ddp_module(self, group: dist.ProcessGroup) -> object:
        module = DistributedDataParallel(torch.nn.Linear(4, 4).to(self._device), process_group=group)
        module(torch.ones(2, 4, device=self._device)).sum().backward()
        return module

    def exception(self, group: dist.ProcessGroup) -> object:
        try:
            dist.all_reduce(self._data, group=group)
            raise RuntimeError("this step failed")
        except RuntimeError as error:
            return error  # its traceback holds this frame, and the frame holds the group


def rest(stage: str, cycles: int) -> None:
    """Hold still, then say what was done before: the window in which this state can be seen from outside.

    The counts that the rank itself finds stand in where nobody looked in time.
    """
    gc.collect()
    time.sleep(REST_S)
    own = Path("/proc/self")
    record(
        "rest",
        stage=stage,
        cycles=cycles,
        duration_s=REST_S,
        threads=sum(1 for _ in own.joinpath("task").iterdir()),
        fds=sum(1 for _ in own.joinpath("fd").iterdir()) - 1,  # without the one that lists them
        maps=own.joinpath("maps").read_bytes().count(b"\n"),
    )


def claimed_workload(device: str) -> None:
    """What the document ran: 100 all-reduces on one group, here between steps of computation."""
    data = torch.ones(16384, device=device)
    weights = torch.randn(512, 512, device=device)
    out = torch.empty_like(weights)
    for _ in range(10):
        torch.mm(weights, weights, out=out)
        dist.all_reduce(data)
    gc.freeze()  # what has been imported need not be looked through again at each rest
    rest("before-all-reduces", 0)
    began = time.perf_counter()
    record("all-reduces-begin")
    for _ in range(ALL_REDUCES):
        torch.mm(weights, weights, out=out)
        dist.all_reduce(data)
        data.fill_(1.0)
    record("all-reduces-end", count=ALL_REDUCES)
    record("work", duration_s=time.perf_counter() - began)
    rest("after-all-reduces", ALL_REDUCES)


def run(use: Callable[[dist.ProcessGroup], object], maker: Maker, kept: list[object] | None) -> None:
    """One cycle. Without `kept` the reference goes before the group does.

    In the other order DDP's reducer would drop the last reference to the group while it holds the GIL, and can deadlock
    (the README says how).
    """
    group = maker.make()
    reference = use(group)
    if kept is not None:
        kept.append(reference)
    del reference
    maker.end(group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("dropped", "kept", "scoped"), default="dropped")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--cycles", type=int, default=5)
    args = parser.parse_args()
    device = "cpu"
    if args.backend == "nccl":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend, timeout=TIMEOUT)
    maker: Maker = Scoped() if args.mode == "scoped" else Plain()
    cycles = Cycles(device)
    kinds = (cycles.group_handle, cycles.work, cycles.ddp_module, cycles.exception)
    for use in kinds:
        run(use, maker, None)  # first uses import modules and grow memory pools
    claimed_workload(device)
    kept: list[object] | None = None if args.mode == "dropped" else []
    for use in kinds:
        for _ in range(args.cycles):
            run(use, maker, kept)
        rest(use.__name__, args.cycles)
    if kept is not None:
        kept.clear()
    rest("released", 0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
