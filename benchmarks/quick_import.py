"""What it saves a process of a scenario to import torch with the garbage collector off: whole processes with and without the plug-in, in pairs.

    python benchmarks/quick_import.py [--pairs 15]

`import torch` does nothing else. `a model under DDP` also wraps one in DistributedDataParallel, for which torch imports as many modules again.
Prints the medians, and the median of the ratios (with against without) with its 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from pathlib import Path

from _processes import Run, ran
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dtprobe import stats
from dtprobe.armrun import Workload

PROGRAMS = {
    "import torch": "import torch",
    "a model under DDP": "import torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
    "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))",
}
HOOKED = Workload((), Path(), 0.0, 1, hooks=("quick_import.py",)).environ(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng, console = random.Random(asked.seed), Console()
    table = Table("program", "n", "without, s", "with, s", "processor time", "wall time", "peak memory")
    for name, code in PROGRAMS.items():
        pairs = [pair(code, rng) for _ in track(range(asked.pairs + 1), name, console=console, transient=True)][1:]
        medians = (f"{statistics.median(one[hooked].cpu_s for one in pairs):.2f}" for hooked in (False, True))
        table.add_row(name, str(len(pairs)), *medians, *(ratio(pairs, what) for what in ("cpu_s", "wall_s", "peak_mb")))
    console.print(table)
    console.print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", highlight=False)


def pair(code: str, rng: random.Random) -> dict[bool, Run]:
    """The program once without and once with the plug-in, in random order. Raises RuntimeError where it fails."""
    found = {}
    for hooked in rng.sample((False, True), 2):
        words = [f"{name}={value}" for name, value in HOOKED.items()] if hooked else []
        found[hooked] = ran(["env", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", *words, sys.executable, "-c", code])
        if found[hooked].code:
            raise RuntimeError(f"{code!r} ended with {found[hooked].code}")
    return found


def ratio(pairs: list[dict[bool, Run]], what: str) -> str:
    one = stats.measured([getattr(runs[True], what) / getattr(runs[False], what) for runs in pairs])
    return f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]"


if __name__ == "__main__":
    main()
