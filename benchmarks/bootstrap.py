"""What starting a job, and making and ending groups, costs beside torch's own, and what each leaves behind.

    python benchmarks/bootstrap.py [--ranks 2,4] [--rounds 5] [--cycles 100]

`start` is `dtprobe.framework.start` (store, identities, default group, registry) beside `init_process_group`, each followed by
its end, in turn, in processes that have imported torch. `cycle` makes a group, all-reduces on it and ends it, all handles and
works kept; growth is that of rank 1's threads and descriptors over all cycles. Medians with the range, on rank 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import psutil
from _ranks import free_port, outputs
from rich.console import Console
from rich.table import Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="world sizes, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=100)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank(options.rounds, options.cycles)
        return
    table = Table("ranks", "what", "torch", "dtprobe", "ratio", "torch grows", "dtprobe grows")
    for size in (int(each) for each in options.ranks.split(",")):
        found = measured(size, options)
        for what in ("start", "cycle"):
            ours, theirs = found[f"{what} dtprobe"], found[f"{what} torch"]
            ratio = statistics.median(ours) / statistics.median(theirs)
            growth = (
                [f"{t:+d} threads, {f:+d} fds" for t, f in (found["growth torch"], found["growth dtprobe"])]
                if what == "cycle"
                else ["", ""]
            )
            table.add_row(str(size), what, _shown(theirs), _shown(ours), f"{ratio:.2f}", *growth)
    Console(width=150).print(table)


def _shown(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e3:.1f} ms ({min(times) * 1e3:.1f}-{max(times) * 1e3:.1f}, n={len(times)})"


def measured(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Start `size` ranks of this program; what rank 1 measured."""
    words = ["--cycles", str(options.cycles), "--rounds", str(options.rounds)]
    ports = ",".join(str(free_port()) for _ in range(options.rounds + 1))
    return json.loads(outputs(__file__, size, words, environ={"PORTS": ports, "MASTER_PORT": ports.partition(",")[0]})[1])


def rank(rounds: int, cycles: int) -> None:
    """One rank of the measured jobs; rank 1 prints what it measured."""
    import torch.distributed as dist

    from dtprobe.framework.bootstrap import resolve, start

    found: dict[str, Any] = {"start torch": [], "start dtprobe": []}
    for port in os.environ["PORTS"].split(",")[1:]:
        begun = time.perf_counter()
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(
            "gloo", init_method=address, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
        )
        dist.destroy_process_group()
        found["start torch"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        with start(resolve(os.environ)):
            pass
        found["start dtprobe"].append(time.perf_counter() - begun)
    with start(resolve(os.environ)) as job:
        for kind in ("dtprobe", "torch"):
            before = _held()
            kept: list[object] = []
            found[f"cycle {kind}"] = [_cycle(kind, job.groups, kept) for _ in range(cycles)]
            dist.barrier()
            found[f"growth {kind}"] = [now - then for now, then in zip(_held(), before, strict=True)]
            kept.clear()
    if os.environ["RANK"] == "1":
        sys.stdout.write(json.dumps(found))


def _cycle(kind: str, groups: Any, kept: list[object]) -> float:
    import torch
    import torch.distributed as dist

    begun = time.perf_counter()
    group = groups.create("cycle") if kind == "dtprobe" else dist.new_group(timeout=timedelta(seconds=60))
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    work.wait()
    kept.extend([group, work])
    if kind == "dtprobe":
        groups.end("cycle")
    else:
        dist.destroy_process_group(group)
    return time.perf_counter() - begun


def _held() -> tuple[int, int]:
    me = psutil.Process()
    return me.num_threads(), me.num_fds()


if __name__ == "__main__":
    main()
