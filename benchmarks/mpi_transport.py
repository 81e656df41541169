"""What collectives cost over MPI and over gloo, side by side in one job.

    python benchmarks/mpi_transport.py [--ranks 2,4] [--rounds 9] [--calls 10]

Starts mpirun on this host. Each round measures every work once over each, in turn, so that both meet the same load. A figure is
the median over rounds of the mean time of a call on rank 0, with the range; the ratio is the median of the rounds' ratios.
`step` is a DDP training step of a perceptron of 1.1 million parameters, its buckets sent asynchronously. `floor` is mpi4py's
own blocking call, for the all-reduces: what the thread, the queue and the timeouts add is the distance to it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from _ranks import interleaved, tell
from rich.console import Console
from rich.table import Table

KINDS = ("gloo", "mpi", "floor")
SIZES = {"all_reduce 8 B": 2, "all_reduce 64 KiB": 2**14, "all_reduce 4 MiB": 2**20}
WORKS = (*SIZES, "all_reduce 4 MiB bfloat16", "all_gather 4 MiB", "broadcast 4 MiB", "step")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "btl", "self,sm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="world sizes, separated by commas")
    parser.add_argument("--calls", type=int, default=10, help="calls a measurement")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        rank(options.calls, options.rounds)
        return
    columns = ("ranks", "work", "gloo", "MPI", "ratio", "floor")
    table = Table(*columns, title=f"{options.calls} calls, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for size in (int(each) for each in options.ranks.split(",")):
        found = measured(size, options)
        for work in WORKS:
            cells = {}
            for kind in KINDS:
                times = [each[work][kind] for each in found if kind in each[work]]
                if times:
                    low, high = min(times) * 1e3, max(times) * 1e3
                    cells[kind] = f"{statistics.median(times) * 1e3:.3f} ms ({low:.3f}-{high:.3f})"
            ratio = statistics.median(each[work]["mpi"] / each[work]["gloo"] for each in found)
            table.add_row(str(size), work, cells["gloo"], cells["mpi"], f"{ratio:.2f}", cells.get("floor", ""))
    Console(width=150).print(table)


def measured(size: int, options: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """Start `size` ranks of this program; what rank 0 measured, a dict a round: work -> kind -> seconds a call."""
    beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [*MPIRUN, "-n", str(size), sys.executable, __file__]
    ran = subprocess.run(
        [*command, "--calls", str(options.calls), "--rounds", str(options.rounds)],
        env=os.environ | {"PATH": beside, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=1200,
        check=False,
    )
    if ran.returncode:
        sys.exit("a rank failed")
    return json.loads(ran.stdout)


def rank(calls: int, rounds: int) -> None:
    """One rank of the measured job; rank 0 prints what it measured."""
    import torch
    import torch.distributed as dist

    from dtprobe.framework.transport import mpi

    torch.set_num_threads(1)
    mpi.register()
    dist.init_process_group(mpi.NAME, timeout=timedelta(seconds=120))
    groups = {"gloo": dist.new_group(backend="gloo"), "mpi": dist.group.WORLD}
    works = {work: {kind: _work(work, group) for kind, group in groups.items()} for work in WORKS}
    for work, numel in SIZES.items():
        works[work]["floor"] = _floor(numel)
    found = interleaved(works, rounds, calls)
    tell(found)


def _work(name: str, group: Any) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    if name == "step":
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
        model = torch.nn.parallel.DistributedDataParallel(layers, process_group=group, bucket_cap_mb=1)
        batch = torch.randn(16, 512)
        return lambda: model(batch).square().mean().backward()
    tensor = torch.zeros(SIZES.get(name, 2**20))
    if name.startswith("all_gather"):
        whole = torch.zeros(2**20 * dist.get_world_size())
        return lambda: dist.all_gather_into_tensor(whole, tensor, group=group)
    if name.startswith("broadcast"):
        return lambda: dist.broadcast(tensor, 0, group=group)
    if name.endswith("bfloat16"):
        tensor = torch.zeros(2**21, dtype=torch.bfloat16)
    return lambda: dist.all_reduce(tensor, group=group)


def _floor(numel: int) -> Callable[[], object]:
    import torch
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    tensor = torch.zeros(numel)
    return lambda: comm.Allreduce(MPI.IN_PLACE, [MPI.buffer.fromaddress(tensor.data_ptr(), numel * 4), numel, MPI.FLOAT])


if __name__ == "__main__":
    main()
