"""What one decision for all ranks costs and saves, what reductions lose, what gloo does with odd buffers, what an audit costs.

    python benchmarks/precision.py [acceptance|scaler|reduction|buffers|audit ...] [--ranks 2,4] [--steps 200] [--rounds 7]

Ranks run on this host over gloo. `acceptance` trains every layout of examples/precision.py with an overflow at each rank, stage and
micro-batch, with both scalers, and compares with a single process. Times are medians over rounds in which all kinds take turns,
with the range; a ratio is within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from _ranks import outputs
from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).parents[1] / "examples"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all without any")
    parser.add_argument("--ranks", default="2,4", help="world sizes, separated by commas")
    parser.add_argument("--steps", type=int, default=200, help="of the acceptance")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if "RANK" in os.environ:
        rank(options)
        return
    for part in options.parts or PARTS:
        table = Table(title=part)
        for size in (int(each) for each in options.ranks.split(",")):
            for row in started(size, part, options):
                if not table.columns:
                    for name in ("ranks", *row):
                        table.add_column(name)
                table.add_row(str(size), *map(str, row.values()))
        Console(width=150).print(table)


def started(size: int, part: str, options: argparse.Namespace) -> list[dict[str, str]]:
    """Start `size` ranks of this program for one part; the rows that rank 0 found."""
    words = [part, "--steps", str(options.steps), "--rounds", str(options.rounds)]
    return json.loads(outputs(__file__, size, words, timeout_s=1200)[0])


def rank(options: argparse.Namespace) -> None:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    sys.path.insert(0, str(EXAMPLES))
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rows = PARTS[options.parts[0]](options)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def acceptance(options: argparse.Namespace) -> list[dict[str, str]]:
    import precision
    import torch.distributed as dist

    from dtprobe.framework.precision import ConsistentScaler

    number, size = dist.get_rank(), dist.get_world_size()
    kinds = precision.every_overflow(size)
    overflows = {step: kinds[at % len(kinds)] for at, step in enumerate(range(3, options.steps, 4))}
    expected = precision.reference(overflows, options.steps)
    rows = []
    for layout, make in precision.LAYOUTS.items():
        if layout == "pp+dp" and size < 4:
            continue
        for name in ("consistent", "stock"):
            scaler = (
                precision.plain_scaler() if name == "stock" else ConsistentScaler("cpu", **precision.SETTINGS, timeout_s=120)
            )
            try:
                found = precision.train(make(number, size, scaler), scaler, overflows, options.steps, number)
                said = [found.skipped == expected.skipped, found.scale, precision.distance(found, expected), len(found.skipped)]
            except RuntimeError as error:
                said = [str(error).partition("!")[0].partition(",")[0][-60:]]
            heard: list[Any] = [None] * size
            dist.all_gather_object(heard, said)
            if name == "consistent":
                scaler.close()
            raised = [each[0] for each in heard if len(each) == 1]
            rows.append(
                {
                    "layout": layout,
                    "scaler": name,
                    "overflows": f"{len(overflows)}, of {min(len(overflows), len(kinds))} kinds",
                    "as one process": "raises" if raised else f"{sum(each[0] for each in heard)} of {size} ranks",
                    "skipped": raised[0] if raised else ", ".join(str(each[3]) for each in heard),
                    "scale": "" if raised else ", ".join(f"{each[1]:g}" for each in heard),
                    "parameters off by": "" if raised else f"{max(each[2] for each in heard):.2g}",
                }
            )
    return rows


def scaler(options: argparse.Namespace) -> list[dict[str, str]]:
    """A DDP step of a small perceptron (99 k parameters), and of a larger one (4.2 M), with each scaler."""
    import torch

    from dtprobe.framework.precision import ConsistentScaler

    rows = []
    for width in (128, 1024):
        steps: dict[str, Callable[[], object]] = {}
        with ConsistentScaler("cpu", init_scale=8.0, timeout_s=120) as consistent:
            for name, each in {"stock": torch.amp.GradScaler("cpu", init_scale=8.0), "consistent": consistent}.items():
                steps[name] = _scaled_step(width, each)
            times = _in_turns(steps, 50 if width == 128 else 10, options.rounds)
        rows.append({"model": f"3 layers of {width}", **_shown(times, "stock")})
    return rows


def audit(options: argparse.Namespace) -> list[dict[str, str]]:
    """Forward and backward under DDP, plain and audited."""
    import torch

    from dtprobe.framework.precision import ReductionAudit

    rows = []
    for width, depth in ((64, 3), (64, 50), (1024, 3)):
        model = torch.nn.parallel.DistributedDataParallel(_layers(width, depth))
        batch = torch.randn(32, width)
        with ReductionAudit(model, timeout_s=120) as whole:

            def plain(model: Any = model, batch: torch.Tensor = batch) -> None:
                model.zero_grad()
                model(batch).square().mean().backward()

            def audited(whole: ReductionAudit = whole, plain: Callable[[], None] = plain) -> None:
                with whole.step() as found:
                    plain()
                found.check()

            times = _in_turns({"plain": plain, "audited": audited}, 10, options.rounds)
        count = sum(parameter.numel() for parameter in model.parameters())
        rows.append({"model": f"{2 * depth} parameters, {count / 1e6:.2g} M elements", **_shown(times, "plain")})
    return rows


def reduction(options: argparse.Namespace) -> list[dict[str, str]]:
    """Relative error of the mean of random gradients against float64."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from dtprobe.framework.precision import reduce_in_fp32

    class Given(torch.nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(100_000, dtype=dtype))

        def forward(self, gradient: torch.Tensor) -> torch.Tensor:
            return (self.weight * gradient.to(self.weight.dtype)).sum()

    torch.manual_seed(dist.get_rank())
    value = torch.randn(100_000).bfloat16().float()
    right = value.double()
    dist.all_reduce(right)
    right /= dist.get_world_size()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    kinds: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
        "DDP, bfloat16 model": (lambda: DistributedDataParallel(Given(torch.bfloat16)), lambda model: None),
        "DDP, float32 model, fp16 hook": (
            lambda: DistributedDataParallel(Given(torch.float32)),
            lambda model: model.register_comm_hook(None, fp16_compress_hook),
        ),
        "FSDP2, bfloat16 compute": (lambda: fully_shard(Given(torch.float32), mp_policy=policy), lambda model: None),
    }
    rows = []
    for name, (make, change) in kinds.items():
        errors = []
        for alter in (change, reduce_in_fp32):
            model = make()
            alter(model)
            model(value).backward()
            gradient = next(model.parameters()).grad
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            errors.append(((gradient.double() - right).norm() / right.norm()).item())
        rows.append({"kind": name, "as it is": f"{errors[0]:.2g}", "reduce_in_fp32": f"{errors[1]:.2g}"})
    return rows


def buffers(options: argparse.Namespace) -> list[dict[str, str]]:
    """Each collective on a column of an 8 x 2 matrix, and what the guard in copy mode makes of it."""
    import torch
    import torch.distributed as dist

    from dtprobe.framework.precision import guarded

    size, number = dist.get_world_size(), dist.get_rank()
    exact = torch.stack([torch.arange(16.0).reshape(8, 2) + 100 * each for each in range(size)])
    total = exact[:, :, 0].sum(0)

    def column() -> tuple[torch.Tensor, torch.Tensor]:
        matrix = exact[number].clone()
        return matrix[:, 0], matrix[:, 1]

    def in_place(call: Callable[[torch.Tensor], object], right: torch.Tensor) -> tuple[int, int]:
        view, beside = column()
        call(view)
        return int((view != right).sum()), int((beside != exact[number][:, 1]).sum())

    def gathered() -> tuple[int, int]:
        whole = torch.zeros(size, 8, 2)
        dist.all_gather([each[:, 0] for each in whole], column()[0])
        return int((whole[:, :, 0] != exact[:, :, 0]).sum()), int((whole[:, :, 1] != 0).sum())

    def scattered() -> tuple[int, int]:
        out = torch.empty(8)
        dist.scatter(out, [each[:, 0] for each in exact] if number == 1 else None, 1)
        return int((out != exact[number][:, 0]).sum()), 0

    def reduce_scattered() -> tuple[int, int]:
        out = torch.zeros(8 // size, 2)
        dist.reduce_scatter_tensor(out[:, 0], exact[number][:, 0])
        return int((out[:, 0] != total.chunk(size)[number]).sum()), int((out[:, 1] != 0).sum())

    def exchanged() -> tuple[int, int]:
        out = torch.empty(8)
        dist.all_to_all_single(out, column()[0])
        return int((out != torch.cat([each[:, 0].chunk(size)[number] for each in exact])).sum()), 0

    def permuted() -> tuple[int, int]:
        matrix = exact[number].clone()
        matrix = matrix.t().contiguous().t() if number else matrix
        dist.all_reduce(matrix)
        return int((matrix != exact.sum(0)).sum()), 0

    calls: Mapping[str, Callable[[], tuple[int, int]]] = {
        "all_reduce": lambda: in_place(dist.all_reduce, total),
        "broadcast": lambda: in_place(lambda view: dist.broadcast(view, 1), exact[1][:, 0]),
        "reduce, at the root": lambda: in_place(lambda view: dist.reduce(view, 0), total),
        "scatter": scattered,
        "all_gather": gathered,
        "reduce_scatter": reduce_scattered,
        "all_to_all_single": exchanged,
        "all_reduce, layouts of ranks differ": permuted,
    }

    def tried(call: Callable[[], tuple[int, int]]) -> str:
        try:
            wrong, beside = call()
        except ValueError as error:
            return f"raises: {error}"
        return f"{wrong} wrong, {beside} beside the view changed" if wrong or beside else "right"

    rows = []
    for name, call in calls.items():
        bare = tried(call)
        with guarded(policy="copy"):
            rows.append({"collective on a column": name, "gloo": bare, "guarded, copy": tried(call)})
    return rows


def _layers(width: int, depth: int) -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))


def _scaled_step(width: int, scaler: Any) -> Callable[[], None]:
    import torch

    model = torch.nn.parallel.DistributedDataParallel(_layers(width, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(32, width)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def _in_turns(works: Mapping[str, Callable[[], object]], calls: int, rounds: int) -> list[dict[str, float]]:
    """Seconds a call by name, a dict a round; a first round warms up."""
    import torch.distributed as dist

    found = []
    for number in range(rounds + 1):
        times = {}
        for name, work in works.items():
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(calls):
                work()
            times[name] = (time.perf_counter() - begun) / calls
        if number:
            found.append(times)
    return found


def _shown(times: list[dict[str, float]], base: str) -> dict[str, str]:
    row = {}
    for name in times[0]:
        each = [one[name] * 1e3 for one in times]
        row[name] = f"{statistics.median(each):.2f} ms ({min(each):.2f}-{max(each):.2f})"
        if name != base:
            row["ratio"] = f"{statistics.median(one[name] / one[base] for one in times):.2f}"
    return row


PARTS: Mapping[str, Callable[[argparse.Namespace], list[dict[str, str]]]] = {
    "acceptance": acceptance,
    "scaler": scaler,
    "reduction": reduction,
    "buffers": buffers,
    "audit": audit,
}

if __name__ == "__main__":
    main()
