"""What standing in front of a group costs, and what checking its collectives costs.

    python benchmarks/checked.py [--ranks 2,4] [--calls 200] [--rounds 7]

Ranks run on this host over gloo. Each round measures every kind once, in turn: torch's own group (`torch`), the same behind a
ScopedGroup (`scoped`), and checked (`checked`). A figure is the median over rounds of the mean time of a call on rank 0, with
the range; the ratio is to `torch` in the same round. `step` is a DDP training step of a small perceptron (two buckets).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from _ranks import interleaved, outputs, tell
from rich.console import Console
from rich.table import Table

KINDS = ("torch", "scoped", "checked")
WORKS = ("all_reduce 4 B", "all_reduce 1 MiB", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="world sizes, separated by commas")
    parser.add_argument("--calls", type=int, default=200, help="calls a measurement")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank(options.calls, options.rounds)
        return
    table = Table(
        "ranks", "work", "torch", "scoped", "ratio", "checked", "ratio", title=f"{options.calls} calls, {options.rounds} rounds"
    )
    for size in (int(each) for each in options.ranks.split(",")):
        found = measured(size, options)
        for work in WORKS:
            cells = []
            for kind in KINDS:
                times = [each[work][kind] for each in found]
                cells.append(f"{statistics.median(times) * 1e3:.3f} ms ({min(times) * 1e3:.3f}-{max(times) * 1e3:.3f})")
                if kind != "torch":
                    cells.append(f"{statistics.median(each[work][kind] / each[work]['torch'] for each in found):.2f}")
            table.add_row(str(size), work, *cells)
    Console(width=150).print(table)


def measured(size: int, options: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """Start `size` ranks of this program; what rank 0 measured, a dict a round: work -> kind -> seconds a call."""
    words = ["--calls", str(options.calls), "--rounds", str(options.rounds)]
    return json.loads(outputs(__file__, size, words)[0])


def rank(calls: int, rounds: int) -> None:
    """One rank of the measured job; rank 0 prints what it measured."""
    import torch.distributed as dist

    from dtprobe.framework.checked import checked
    from dtprobe.framework.groups import Groups

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    with Groups(timeout_s=120) as groups:
        plain, scoped = dist.new_group(), groups.create("scoped")
        behind = dist.new_group()
        with checked(behind, timeout_s=120) as watched:
            members: dict[str, Any] = {"torch": plain, "scoped": scoped, "checked": watched}
            works = {work: {kind: _work(work, members[kind]) for kind in KINDS} for work in WORKS}
            found = interleaved(works, rounds, calls)
    tell(found)


def _work(name: str, group: Any) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    if name == "step":
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128))
        model = torch.nn.parallel.DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.1)
        batch = torch.randn(32, 128)
        return lambda: model(batch).square().mean().backward()
    tensor = torch.zeros(1 if name.endswith(" 4 B") else 2**18)
    return lambda: dist.all_reduce(tensor, group=group)


if __name__ == "__main__":
    main()
