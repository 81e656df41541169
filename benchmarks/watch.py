"""What `dtprobe watch` costs a job: a step loop of two gloo ranks, watched and not, interleaved.

    python benchmarks/watch.py [--pairs 60] [--seconds 0.5] [--whole 5]
    python benchmarks/watch.py --gpus    # two ranks on NCCL: 1 KB all-reduces back to back, and a small DDP step

The first row: the watch runs beside the same two processes all the time, and sees them or not, in pairs of stretches of random
order. The second: pairs of whole jobs, with the watch and its hook in the ranks, and without either. The ranks' flight recorders are full
(2000 entries), their dearest state. Prints the median of the ratios of step time over the pairs with its 95 % bootstrap
interval, and of the ranks' processor time, which says more on a machine with other work.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
import statistics

from probes import GLOO, NCCL, light, percent, whole
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dtprobe import watch
from dtprobe.probes.hang import Found, Watched

SUSPECT_S = 15.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of stretches beside the same processes")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a stretch")
    parser.add_argument("--whole", type=int, default=5, help="pairs of whole jobs, of ten such lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", action="store_true", help="two ranks on two GPUs; NCCL's ring is part of the watch there")
    arguments = parser.parse_args()
    console, rng = Console(), random.Random(arguments.seed)

    def alarm(found: Found) -> None:
        console.print(f"a healthy job was suspected: {found}", style="bold red", highlight=False)

    recorders = watch.recorders(Watched(told=alarm, resumed=alarm, bundled=lambda: None), SUSPECT_S)
    table = Table(
        "watch", "n", "step, us", "step time", "ranks' processor time", "own, of a core", "its threads, of a rank's core"
    )
    rows = [("beside the same processes", light, arguments.pairs), ("whole jobs, with its hook", whole, arguments.whole)]
    programs = NCCL if arguments.gpus else {"": GLOO}
    with Progress(console=console, transient=True) as progress:
        for (step, program), (how, measure, pairs) in itertools.product(programs.items(), rows):
            if pairs < 1:
                continue
            name = f"{how}, {step}" if step else how
            task = progress.add_task(name, total=pairs)
            tick = functools.partial(progress.advance, task)
            cost = measure(name, recorders, pairs, arguments.seconds, rng, tick, program)
            shares = (percent(cost.own, 0), percent(cost.served, 0))
            bare_us = f"{1e6 * statistics.median(cost.step_s):.1f}"
            table.add_row(name, str(len(cost.wall)), bare_us, percent(cost.wall), percent(cost.cpu), *shares)
    console.print(table)
    console.print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", highlight=False)


if __name__ == "__main__":
    main()
