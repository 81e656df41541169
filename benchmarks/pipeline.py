"""What the exchange costs a pipeline, beside torch's own schedules on the same group.

    python benchmarks/pipeline.py [--ranks 2,4] [--steps 20] [--rounds 7] [--width 64]

Ranks run on this host over gloo, each with one stage (Interleaved1F1B: two). Each round runs every schedule twice, in turn: as
torch issues its messages (`torch`), and through an exchange (`ours`). A figure is the median over rounds of the mean time of a
step of 8 micro-batches on rank 0, with the range; the ratio is to `torch` in the same round. `messages` is how many rank 0
exchanges a step. `dynamic` is the same step with shapes negotiated for every message. `more CPU a message` is what the process of
rank 0 spends beyond torch's own (its watcher thread included), which a busy machine disturbs less than the times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from datetime import timedelta
from typing import Any

from _ranks import outputs, tell
from rich.console import Console
from rich.table import Table

SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}
KINDS = ("torch", "ours", "dynamic")
MICROBATCHES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="world sizes, separated by commas")
    parser.add_argument("--steps", type=int, default=20, help="steps a measurement")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=64, help="width of the model's layers")
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank(options)
        return
    table = Table(
        "ranks",
        "schedule",
        "messages",
        "torch",
        "ours",
        "ratio",
        "dynamic",
        "ratio",
        "more CPU a message",
        title=f"a step, {options.rounds} rounds",
    )
    for size in (int(each) for each in options.ranks.split(",")):
        found = measured(size, options)
        for name in SCHEDULES:
            cells = [f"{found[0][name]['messages']:.0f}"]
            for kind in KINDS:
                times = [each[name][kind] for each in found]
                cells.append(f"{statistics.median(times) * 1e3:.2f} ms ({min(times) * 1e3:.2f}-{max(times) * 1e3:.2f})")
                if kind != "torch":
                    cells.append(f"{statistics.median(each[name][kind] / each[name]['torch'] for each in found):.2f}")
            more = statistics.median(
                (each[name]["ours cpu"] - each[name]["torch cpu"]) / each[name]["messages"] for each in found
            )
            table.add_row(str(size), name, *cells, f"{more * 1e6:.0f} us")
    Console(width=170).print(table)


def measured(size: int, options: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """Start `size` ranks of this program; what rank 0 measured, a dict a round: schedule -> kind -> seconds a step."""
    words = ["--steps", str(options.steps), "--rounds", str(options.rounds), "--width", str(options.width)]
    return json.loads(outputs(__file__, size, words)[0])


def rank(options: argparse.Namespace) -> None:
    """One rank of the measured job; rank 0 prints what it measured."""
    import torch.distributed as dist

    from dtprobe.framework.groups import Groups
    from dtprobe.framework.pipeline import Exchange

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    found: list[dict[str, dict[str, float]]] = []
    runs: dict[str, dict[str, Any]] = {}
    exchanges: list[Any] = []
    with Groups(timeout_s=120) as groups:
        for name, several in SCHEDULES.items():
            stages = several * dist.get_world_size()
            ours, dynamic = (
                Exchange(groups.create(f"{name} {kind}"), stages=stages, timeout_s=120, dynamic=kind == "dynamic")
                for kind in ("ours", "dynamic")
            )
            exchanges += [ours, dynamic]
            group = groups.create(f"{name} torch")
            runs[name] = {
                "torch": _step(name, stages, options.width, group, None),
                "ours": _step(name, stages, options.width, ours.group, ours),
                "dynamic": _step(name, stages, options.width, dynamic.group, dynamic),
            }
            runs[name]["exchange"] = ours
        for number in range(options.rounds + 1):
            times: dict[str, dict[str, float]] = {}
            for name, kinds in runs.items():
                done = kinds["exchange"].completed
                times[name] = {}
                for kind in KINDS:
                    times[name][kind], times[name][f"{kind} cpu"] = _timed(kinds[kind], options.steps)
                times[name]["messages"] = (kinds["exchange"].completed - done) / options.steps
            if number:  # the first round warms up, and settles what the channels carry
                found.append(times)
        for exchange in exchanges:
            exchange.close()
    tell(found)


def _step(name: str, stages: int, width: int, group: Any, exchange: Any) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining

    from dtprobe.framework.pipeline import exchanged

    rank, size = dist.get_rank(), dist.get_world_size()
    mine = []
    for index in range(rank, stages, size):
        block = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())
        stage = pipelining.PipelineStage(block, index, stages, torch.device("cpu"), group=group)
        mine.append(exchanged(stage, exchange) if exchange else stage)
    loss = torch.nn.functional.mse_loss
    schedule = getattr(pipelining, f"Schedule{name}")(mine if len(mine) > 1 else mine[0], MICROBATCHES, loss_fn=loss)
    x, target = torch.randn(8 * MICROBATCHES, width), torch.zeros(8 * MICROBATCHES, width)
    arguments = [x] if rank == 0 else []
    return (lambda: schedule.step(*arguments, target=target)) if rank == size - 1 else (lambda: schedule.step(*arguments))


def _timed(call: Any, steps: int) -> tuple[float, float]:
    """Seconds a step, and seconds of this process's CPU time a step."""
    import torch.distributed as dist

    dist.barrier()
    begun, spent = time.perf_counter(), time.process_time()
    for _ in range(steps):
        call()
    spent = time.process_time() - spent
    dist.barrier()
    return (time.perf_counter() - begun) / steps, spent / steps


if __name__ == "__main__":
    main()
