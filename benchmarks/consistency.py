"""What the consistency check costs, beside what it saves and beside the training it watches.

    python benchmarks/consistency.py [--ranks 2,4] [--rounds 7]

Ranks run on this host over gloo. Each round measures every kind once, in turn, over the parameters of a perceptron:
`step`, a DDP step with 32 samples; `check`, all of them compared (values, shapes, dtypes, strides and the rest); `all-gather`, all
of them sent to every rank and compared there, which is what finds the same without digests; `norm`, one float norm of each
tensor all-reduced, which is cheaper and does not see a flipped bit. A figure is the median over rounds on rank 0, with the
range; the ratio is to `check` in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from datetime import timedelta

from _ranks import interleaved, outputs, tell
from rich.console import Console
from rich.table import Table

KINDS = ("check", "all-gather", "norm", "step")
MODELS = {"10 M in 4 tensors": (2236, 2), "1.6 M in 48 tensors": (256, 24)}
"""Width and number of the linear layers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="world sizes, separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank(options.rounds)
        return
    table = Table("ranks", "parameters", *KINDS, title=f"median of {options.rounds} rounds (range), x times the check")
    for size in (int(each) for each in options.ranks.split(",")):
        found = measured(size, options.rounds)
        for model in MODELS:
            cells = []
            for kind in KINDS:
                times = [each[model][kind] for each in found]
                ratio = statistics.median(each[model][kind] / each[model]["check"] for each in found)
                cells.append(
                    f"{statistics.median(times) * 1e3:.1f} ms ({min(times) * 1e3:.1f}-{max(times) * 1e3:.1f}) x {ratio:.2f}"
                )
            table.add_row(str(size), model, *cells)
    Console(width=160).print(table)


def measured(size: int, rounds: int) -> list[dict[str, dict[str, float]]]:
    """Start `size` ranks of this program; what rank 0 measured, a dict a round: model -> kind -> seconds."""
    return json.loads(outputs(__file__, size, ["--rounds", str(rounds)])[0])


def rank(rounds: int) -> None:
    """One rank of the measured job; rank 0 prints what it measured."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    works = {name: _works(*shape) for name, shape in MODELS.items()}
    found = interleaved(works, rounds)
    tell(found)


def _works(width: int, layers: int) -> dict[str, Callable[[], object]]:
    import torch
    import torch.distributed as dist

    from dtprobe.framework.consistency import require_consistent

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    parameters = list(model.parameters())
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    batch = torch.randn(32, width)

    def step() -> None:
        ddp(batch).square().mean().backward()

    def all_gather() -> None:
        for parameter in parameters:
            copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(copies, parameter.detach())
            assert all(torch.equal(copies[0], copy) for copy in copies)

    def norm() -> None:
        norms = torch.stack(torch._foreach_norm([parameter.detach() for parameter in parameters]))
        dist.all_reduce(norms, dist.ReduceOp.MAX)

    return {"check": lambda: require_consistent(model), "all-gather": all_gather, "norm": norm, "step": step}


if __name__ == "__main__":
    main()
