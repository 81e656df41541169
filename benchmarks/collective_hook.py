"""What the collective faults' hook costs a small gloo all_reduce: the same two ranks with and without it, interleaved.

    python benchmarks/collective_hook.py

Arms: no hook; a fault that aims at another rank; one at another operation; one at another group of the same operation (every
call is looked at, none is acted on). The last three run under the hook on both ranks. Prints median and middle half.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300
FAULTS = {
    "no hook": None,
    "a fault of another rank": {"rank": [7], "op": "all_reduce", "group": None},
    "a fault of another operation": {"rank": None, "op": "broadcast", "group": None},
    "a fault of another call": {"rank": None, "op": "all_reduce", "group": None},
    "a fault of another group": {"rank": None, "op": "all_reduce", "group": "nobody's"},
}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--calls", type=int, default=2000, help="all-reduces of 1 KB a round")
    options.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.worker is not None:
        return worker(chosen.worker)
    with tempfile.TemporaryDirectory() as scratch:
        pairs = {name: Pair(Path(scratch) / str(place), fault) for place, (name, fault) in enumerate(FAULTS.items())}
        try:
            found: dict[str, list[tuple[float, ...]]] = {name: [] for name in pairs}
            for turn in range(chosen.rounds + 1):
                order = list(pairs)
                for name in order[turn % len(order) :] + order[: turn % len(order)]:
                    took = pairs[name].round(chosen.calls)
                    if turn:  # the first warms up
                        found[name].append(took)
        finally:
            for pair in pairs.values():
                pair.end()
    title = f"{chosen.rounds} interleaved rounds of {chosen.calls} calls, us a call on rank 0"
    shown = Table("arm", "what", "median", "middle half", "more", "ratio", title=title)
    for place, what in enumerate(("time", "CPU time")):
        for name, values in found.items():
            own = [one[place] for one in values]
            both = [(one, other[place]) for one, other in zip(own, found["no hook"], strict=True)]
            low, _, high = statistics.quantiles(own, n=4)
            more, ratio = (
                statistics.median(one - other for one, other in both),
                statistics.median(one / other for one, other in both),
            )
            shown.add_row(
                name, what, f"{statistics.median(own):.1f}", f"{low:.1f} to {high:.1f}", f"{more:+.1f}", f"{ratio:.3f}"
            )
    Console().print(shown)
    return 0


class Pair:
    """Two ranks that live through all rounds, and reduce when they are told to."""

    def __init__(self, folder: Path, fault: dict[str, object] | None) -> None:
        plan = folder / "plan"
        plan.mkdir(parents=True)
        environ = {
            **{name: value for name, value in os.environ.items() if name not in ("RANK", "DTPROBE_HOOKS")},
            **{"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "BENCH_STORE": str(folder / "store")},
        }
        if fault is not None:
            counted = {key: None for key in ("nth", "every", "times", "probability")} | {
                "op": fault["op"],
                "group": fault["group"],
                "nth": [10**9],
            }
            part = {"index": 0, "seed": 0, "rank": fault["rank"], "after_s": 0, "counted": counted}
            part |= {"action": "skip", "config": {}, "ops": None, "text": "never"}
            (plan / "000.json").write_text(json.dumps(part), encoding="utf-8")
            environ |= {
                "PYTHONPATH": str(ROOT / "dtprobe" / "hook"),
                "DTPROBE_HOOKS": str(ROOT / "injectors" / "collective" / "collective_faults.py"),
                "DTPROBE_FOLDER": str(folder),
                "DTPROBE_COLLECTIVE_PLAN": str(plan),
            }
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", str(rank)],
                env=environ | {"RANK": str(rank), "WORLD_SIZE": "2"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for rank in (0, 1)
        ]

    def round(self, calls: int) -> tuple[float, ...]:
        """Microseconds a call on rank 0: of time, and of CPU time."""
        for rank in self._ranks:
            assert rank.stdin
            rank.stdin.write(f"{calls}\n")
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout]
        if not all(lines):
            sys.exit("a rank ended early")
        return tuple(float(word) for word in lines[0].split())

    def end(self) -> None:
        for rank in self._ranks:
            if rank.stdin:
                rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(LIMIT_S)
            finally:
                rank.kill()


def worker(rank: int) -> int:
    """One rank: for each line of standard input so many all-reduces, and the microseconds of one."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{os.environ['BENCH_STORE']}", rank=rank, world_size=2)
    data = torch.ones(256)
    for line in sys.stdin:
        dist.all_reduce(data)
        start = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            dist.all_reduce(data)
        took = time.perf_counter() - start[0], time.process_time() - start[1]
        print(*(one / int(line) * 1e6 for one in took), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
