"""What the NCCL shim's ring costs a call: the same calls with and without it, interleaved.

    python benchmarks/nccl_ring.py             # against the test double of libnccl, no GPU
    python benchmarks/nccl_ring.py --gpus 2    # torch and real NCCL: 1 KB all-reduces back to back, and a small DDP step

Prints a table: median and middle half of the rounds, the difference and the ratio. Over GPUs first 1 KB all-reduces without torch: each rank
calls libnccl itself and through the shim in turn, in blocks of random order in one process, which leaves out what differs between two starts.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dtprobe import catalog, stats
from dtprobe.errors import Unavailable
from dtprobe.readers.nccl_ring import read_nccl_ring

NCCL = Path(__file__).resolve().parent.parent / "injectors" / "nccl"
LIMIT_S = 300
SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "OMP_NUM_THREADS": "1"}
PAIRS, BLOCK = 60, 500


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--calls", type=int, default=200_000, help="calls a round (with --gpus: all-reduces a round)")
    options.add_argument("--gpus", type=int, default=0, help="run torch over this many GPUs instead of the test double")
    options.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options.add_argument("--direct", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.direct:
        return direct_worker()
    if chosen.worker is not None:
        return worker(chosen.worker)
    catalog.injectors()
    build = sys.modules["_dtprobe_injector_nccl"].build
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shim = made(build.shim(folder=folder))
        if chosen.gpus:
            direct(chosen.gpus, shim, folder)
            measure = torch_job(chosen.gpus, chosen.calls if chosen.calls != 200_000 else 2000)
        else:
            measure = double(build, folder, chosen.calls)
        table(rounds(measure, shim, folder, chosen.rounds), chosen.rounds)
    return 0


def made(one: Path | Unavailable) -> Path:
    if isinstance(one, Unavailable):
        sys.exit(str(one))
    return one


Measure = Callable[[dict[str, str]], dict[str, float]]


def double(build: object, folder: Path, calls: int) -> Measure:
    """Nanoseconds a call, by a C program linked with the test double."""
    fake = made(
        build.library("libnccl.so.2", (NCCL / "testing/fakenccl.c",), flags=("-Wl,-soname,libnccl.so.2",), folder=folder)  # type: ignore[attr-defined]
    )
    program = folder / "calls"
    cc = str(made(build.compiler()))  # type: ignore[attr-defined]
    rpath = f"-Wl,-rpath,{fake.parent}"
    subprocess.run(
        [cc, "-O2", "-o", str(program), str(NCCL / "testing/calls.c"), str(fake), rpath], check=True, timeout=LIMIT_S
    )
    return lambda environ: {"ncclAllReduce, one rank, ns": float(output([str(program), str(calls)], environ))}


def output(command: list[str], environ: dict[str, str]) -> str:
    return subprocess.run(
        command, env={**os.environ, **environ}, check=True, capture_output=True, text=True, timeout=LIMIT_S
    ).stdout


def torch_job(gpus: int, calls: int) -> Measure:
    """Microseconds a call and milliseconds a step, by torchrun over real GPUs."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"),
        *(__file__, "--worker", str(calls)),
    ]

    def measure(environ: dict[str, str]) -> dict[str, float]:
        lines = [line.split("\t") for line in output(command, SAFE | environ).splitlines() if "\t" in line]
        return {name: float(value) for name, value in lines}

    return measure


def direct(gpus: int, shim: Path, folder: Path) -> None:
    """Print what the shim adds to a call of ncclAllReduce: the median of the pairs, with its 95 % bootstrap interval."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    rings = folder / "direct"
    rings.mkdir()
    environ = {**SAFE, "LD_PRELOAD": str(shim), "DTPROBE_NCCL_FOLDER": str(rings)}
    told = output([*launch, __file__, "--direct"], environ)
    found = next(json.loads(line) for line in told.splitlines() if line.startswith("{"))
    bare = statistics.median(found["itself"])
    more = stats.measured([through - itself for through, itself in zip(found["through"], found["itself"], strict=True)])
    ratio = stats.measured(
        [100 * (through / itself - 1) for through, itself in zip(found["through"], found["itself"], strict=True)]
    )
    calls = sum(len(read_nccl_ring(path)) for path in rings.rglob("*.ring"))
    Console().print(
        f"ncclAllReduce of 1 KB, {gpus} ranks, n={len(found['itself'])} pairs of blocks of {BLOCK} calls: {bare:.2f} us, through the shim "
        f"{1e3 * more.value:+.0f} ns [{1e3 * more.low:+.0f}, {1e3 * more.high:+.0f}], {ratio.value:+.2f} % [{ratio.low:+.2f}, {ratio.high:+.2f}]; "
        f"{calls} calls in the rings",
        highlight=False,
    )


class UniqueId(ctypes.Structure):
    """ncclUniqueId (nccl.h): 128 bytes, handed over by value."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


def direct_worker() -> int:
    """One rank of `direct`; rank 0 prints microseconds a call of each block, as JSON."""
    import random

    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    shim, nccl = ctypes.CDLL(None), ctypes.CDLL("libnccl.so.2")
    own = UniqueId()
    if rank == 0 and (code := shim.ncclGetUniqueId(ctypes.byref(own))):
        sys.exit(f"ncclGetUniqueId: {code}")
    box = [bytes(own.internal)]
    dist.broadcast_object_list(box, 0)
    ctypes.memmove(ctypes.byref(own), box[0], 128)
    comm = ctypes.c_void_p()
    shim.ncclCommInitRank.argtypes = (ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int)
    if code := shim.ncclCommInitRank(ctypes.byref(comm), ranks, own, rank):
        sys.exit(f"ncclCommInitRank: {code}")
    data = torch.ones(256, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    kinds = {"itself": nccl.ncclAllReduce, "through": shim.ncclAllReduce}
    for call in kinds.values():
        call.argtypes = (*[ctypes.c_void_p] * 2, ctypes.c_size_t, *[ctypes.c_int] * 2, *[ctypes.c_void_p] * 2)
    if ctypes.cast(kinds["itself"], ctypes.c_void_p).value == ctypes.cast(kinds["through"], ctypes.c_void_p).value:
        sys.exit("libnccl.so.2 gives the shim's own ncclAllReduce: nothing to compare")
    address, rng = data.data_ptr(), random.Random(0)
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(PAIRS + 5):
        for kind in rng.sample(sorted(kinds), 2):
            call = kinds[kind]
            dist.barrier()
            start = time.perf_counter()
            for _ in range(BLOCK):
                call(address, address, 256, 7, 0, comm, stream)  # ncclFloat32, ncclSum
            torch.cuda.synchronize()
            if turn >= 5:
                found[kind].append((time.perf_counter() - start) / BLOCK * 1e6)
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    shim.ncclCommDestroy(comm)
    dist.destroy_process_group()
    return 0


def worker(calls: int) -> int:
    """One rank of `torch_job`; rank 0 prints name, tab, value."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    data = torch.ones(256, device=device)
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).to(device))
    batch = torch.ones(64, 256, device=device)

    def reduce() -> None:
        dist.all_reduce(data)

    def step() -> None:
        model.zero_grad()
        model(batch).sum().backward()

    for name, scale, turns, work in (("all_reduce of 1 KB, us", 1e6, calls, reduce), ("DDP step, ms", 1e3, 200, step)):
        for _ in range(turns // 10):
            work()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(turns):
            work()
        torch.cuda.synchronize()
        if dist.get_rank() == 0:
            print(f"{name}\t{(time.perf_counter() - start) / turns * scale}", flush=True)
    dist.destroy_process_group()
    return 0


def rounds(measure: Measure, shim: Path, folder: Path, many: int) -> dict[str, dict[str, list[float]]]:
    """name -> arm -> one value a round; the arms take turns, and take turns at being first."""
    plan = folder / "plan"
    plan.write_text(
        "dtprobe-nccl-plan 1\nfault action=delay call=ncclAllReduce rank=99 nth=1 hold_ns=1 label=never\n", encoding="utf-8"
    )
    arms = {"without": {}, "recording": {"LD_PRELOAD": str(shim)}, "and a fault that aims elsewhere": {"LD_PRELOAD": str(shim)}}
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(many):
        order = list(arms)
        for arm in order[turn % 3 :] + order[: turn % 3]:
            with tempfile.TemporaryDirectory(dir=folder) as rings:
                environ = dict(arms[arm])
                if environ:
                    environ["DTPROBE_NCCL_FOLDER"] = rings
                if "fault" in arm:
                    environ["DTPROBE_NCCL_PLAN"] = str(plan)
                for name, value in measure(environ).items():
                    found.setdefault(name, {key: [] for key in arms})[arm].append(value)
    return found


def table(found: dict[str, dict[str, list[float]]], many: int) -> None:
    shown = Table("measure", "arm", "median", "middle half", "more", "ratio", title=f"NCCL ring, {many} interleaved rounds")
    for name, arms in found.items():
        base = statistics.median(arms["without"])
        for arm, values in arms.items():
            low, _, high = statistics.quantiles(values, n=4)
            median = statistics.median(values)
            shown.add_row(
                name, arm, f"{median:.2f}", f"{low:.2f} to {high:.2f}", f"{median - base:+.2f}", f"{median / base:.3f}"
            )
    Console().print(shown)


if __name__ == "__main__":
    sys.exit(main())
