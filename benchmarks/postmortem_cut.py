"""What cutting a postmortem into shares gains and costs: one process, and the same dumps over one and two processes of `--on local`.

    python benchmarks/postmortem_cut.py [--ranks 512] [--entries 2000] [--frames 10] [--rounds 3]

The dumps are those of flight_recorder.py, in a temporary folder that is removed at the end. Each round runs, in turn, the postmortem in
one process, and in shares with one and with two processes at a time, each started anew. Told are medians with the range: wall clock of
the whole command, processor time of all its processes and of the joining one alone (which starts, lists the files, decodes what came
back, matches, decides: what no number of nodes makes shorter), peak memory of the joining process and of the largest that reads a share.
Ratios are to the one process of the same round. Wall clock needs two idle cores. Exit code 1 where answers differ by a letter, two
processes are not faster than 0.75 of one, or the joining process takes more than 1.1 of the memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from _processes import Run, ran
from flight_recorder import made
from rich.console import Console
from rich.table import Table

from dtprobe.diagnose import diagnose
from dtprobe.diagnose.cut import OnEngine
from dtprobe.diagnose.pieces import Reader, here
from dtprobe.engines import Done, Engine, Task, named
from dtprobe.errors import Unavailable

FASTER, LEANER = 0.75, 1.1
KINDS = ("whole", "local:jobs=1", "local:jobs=2")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--frames", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "DIR"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one[0], Path(options.one[1]))))
        return 0
    behind = options.ranks * 3 // 5
    with tempfile.TemporaryDirectory(prefix="dtprobe-bench-") as folder:
        dumps = Path(folder, "dumps")
        dumps.mkdir()
        size = sum(made(dumps, rank, options, rank == behind) for rank in range(options.ranks))
        found: dict[str, list[Run]] = {kind: [] for kind in KINDS}
        for _ in range(options.rounds):
            for kind in KINDS:
                found[kind].append(ran([sys.executable, __file__, "--one", kind, str(dumps)]))
    return told(found, f"{options.ranks} ranks x {options.entries} entries x {options.frames} frames, {size / 1e6:.0f} MB")


@dataclass
class Timed:
    """An engine that says how long it took."""

    engine: Engine
    took_s: float = 0.0
    tasks: int = 0
    name: str = field(default="timed")

    def probe(self) -> Unavailable | None:
        return self.engine.probe()

    def run(self, tasks: Sequence[Task], *, into: Path, ended: Callable[[Done], None]) -> None:
        began = time.perf_counter()
        self.engine.run(tasks, into=into, ended=ended)
        self.took_s += time.perf_counter() - began
        self.tasks += len(tasks)


def one(kind: str, dumps: Path) -> dict[str, object]:
    """One postmortem in this process and those that it starts."""
    reader: Reader = here
    engine = Timed(named(kind if kind != "whole" else "local", os.environ))
    if kind != "whole":
        reader = OnEngine(engine=engine, roots=[dumps], base=dumps.parent)
    answer = diagnose([dumps], reader=reader)
    return {
        "answer": json.dumps(answer.json),
        "first": answer.first_failing_rank,
        "shares": engine.tasks,
        "read_s": engine.took_s,
        "own_s": time.process_time(),
        "own_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "task_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    }


def told(found: dict[str, list[Run]], title: str) -> int:
    """Print the table; the exit code."""
    said = {kind: [json.loads(run.out) for run in runs] for kind, runs in found.items()}
    table = Table(
        "",
        "shares",
        "wall s",
        "ratio",
        "all processors s",
        "ratio",
        "joining s",
        "shares read, wall s",
        "peak MB",
        "ratio",
        "of a share MB",
    )
    table.title = title
    wall, memory = {}, {}
    for kind, runs in found.items():
        walls = [run.wall_s for run in runs]
        wall[kind] = statistics.median(run.wall_s / whole.wall_s for run, whole in zip(runs, found["whole"], strict=True))
        memory[kind] = statistics.median(
            run["own_mb"] / whole["own_mb"] for run, whole in zip(said[kind], said["whole"], strict=True)
        )
        table.add_row(
            kind,
            str(said[kind][0]["shares"] or "-"),
            f"{statistics.median(walls):.1f} ({min(walls):.1f}-{max(walls):.1f})",
            f"{wall[kind]:.2f}",
            f"{statistics.median(run.cpu_s for run in runs):.1f}",
            f"{statistics.median(run.cpu_s / whole.cpu_s for run, whole in zip(runs, found['whole'], strict=True)):.2f}",
            f"{statistics.median(run['own_s'] for run in said[kind]):.1f}",
            f"{statistics.median(run['read_s'] for run in said[kind]):.1f}" if said[kind][0]["shares"] else "-",
            f"{max(run['own_mb'] for run in said[kind]):.0f}",
            f"{memory[kind]:.2f}",
            f"{max(run['task_mb'] for run in said[kind]):.0f}" if said[kind][0]["shares"] else "-",
        )
    Console(width=150).print(table)
    answers = {run["answer"] for runs in said.values() for run in runs}
    print(f"{len(answers)} different answer{'s' * (len(answers) != 1)}; first failing rank {said['whole'][0]['first']}")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    return 0 if len(answers) == 1 and wall[KINDS[-1]] <= FASTER and max(memory.values()) <= LEANER else 1


if __name__ == "__main__":
    sys.exit(main())
