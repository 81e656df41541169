"""What the address of a half-precision buffer costs NCCL: bandwidth by offset and size, and whether anything is wrong there.

    python benchmarks/alignment.py [--rounds 7] [--sizes 1,16,256,1024] [--json FILE]    # two GPUs
    python benchmarks/alignment.py --sanitize                                          # every check under compute-sanitizer

Offsets are measured in turn, round by round, in one job. `guarded` is the worst offset under `dtprobe.framework.precision.guarded` with an
alignment of 32 bytes, which hands an aligned copy down. busbw is that of nccl-tests: 2 (n - 1) / n of the bytes a second for an
all-reduce, (n - 1) / n of the gathered ones for an all-gather.
From a checkout that is not installed: PYTHONPATH=. in front.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ALIGNMENT = 32
OFFSETS = (0, 2, 4, 8, 16, 32)
CALLS = 10
LIMIT_S = 400
HARMLESS = re.compile(r"cudaErrorNoKernelImageForDevice|no kernel image is available")
"""NCCL tries kernels for other chips when it starts; the sanitizer tells of each."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--sizes", default="1,16,256,1024", help="MiB, comma separated")
    options.add_argument(
        "--sanitize", action="store_true", help="check values under compute-sanitizer's memcheck, no bandwidth"
    )
    options.add_argument("--json", type=Path, help="also write what was found here")
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    sizes = [int(size) << 20 for size in chosen.sizes.split(",")]
    if chosen.worker:
        return worker(sizes, 0 if chosen.sanitize else chosen.rounds)
    prefix = []
    if chosen.sanitize:
        if (tool := shutil.which("compute-sanitizer")) is None:
            sys.exit("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
        prefix = [tool, "--tool", "memcheck", "--target-processes", "all", "--report-api-errors", "all"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["--worker", "--sizes", "1" if chosen.sanitize else chosen.sizes, "--rounds", str(chosen.rounds)]
    safe = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*prefix, *launch, __file__, *words, *(["--sanitize"] if chosen.sanitize else [])],
        env={**os.environ, **safe},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    found = next((json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"checks"')), None)
    if found is None:
        sys.exit(f"the job ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-800:]}")
    if chosen.sanitize:
        found["sanitizer"] = sanitized(done.stdout + done.stderr)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    console = Console(width=160)
    console.print(f"{found['checks']} checks, {found['wrong']} wrong", highlight=False)
    for text, times in found.get("sanitizer", {}).items():
        console.print(f"{times} x {text}", highlight=False)
    if not chosen.sanitize:
        console.print(table(found["seconds"], chosen.rounds))
    return 1 if found["wrong"] else 0


def sanitized(text: str) -> dict[str, int]:
    """How often the sanitizer told of what; "harmless" is NCCL's own search for kernels."""
    told: dict[str, int] = {}
    for line in text.splitlines():
        words = line.lstrip("= ").strip()
        if line.startswith("=========") and re.search(r"(Invalid|Misaligned|Program hit|Race|leaked|ERROR SUMMARY)", words):
            kind = "harmless: no kernel image for this chip" if HARMLESS.search(words) else words[:140]
            told[kind] = told.get(kind, 0) + 1
    return told


def table(seconds: dict[str, dict[str, dict[str, list[float]]]], rounds: int) -> Table:
    shown = Table(
        "operation",
        "MiB",
        *(f"+{off} B" if off else "aligned" for off in OFFSETS),
        "+2 B, guarded",
        title=f"busbw, GB/s: median (lowest to highest) of {rounds} rounds",
    )
    for operation, sizes in seconds.items():
        for size, kinds in sizes.items():
            cells = []
            for values in kinds.values():
                speeds = [int(size) / value / 1e9 / (1 if operation == "all_reduce" else 2) for value in values]
                cells.append(f"{statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})")
            shown.add_row(operation, str(int(size) >> 20), *cells)
    return shown


def worker(sizes: list[int], rounds: int) -> int:
    """One rank; rank 0 prints the answer as JSON."""
    import torch
    import torch.distributed as dist

    from dtprobe.framework.precision import guarded

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    ranks, checks, wrong = dist.get_world_size(), 0, 0
    seconds: dict[str, dict[str, dict[str, list[float]]]] = {}
    for size in sizes:
        # The gathered tensor is `size` bytes: busbw counts those for an all-gather.
        room = torch.zeros(size + 2 * ALIGNMENT, dtype=torch.uint8, device="cuda")
        gathered = torch.zeros(size + 2 * ALIGNMENT, dtype=torch.uint8, device="cuda")

        def at(base: torch.Tensor, off: int, length: int) -> torch.Tensor:
            start = -base.data_ptr() % ALIGNMENT + off
            return base[start : start + length].view(torch.float16)

        def reduce(off: int, room: torch.Tensor = room, size: int = size, at: Any = at) -> Callable[[], None]:
            tensor = at(room, off, size)
            return lambda: dist.all_reduce(tensor)

        def gather(
            off: int, room: torch.Tensor = room, gathered: torch.Tensor = gathered, size: int = size, at: Any = at
        ) -> Callable[[], None]:
            into, tensor = at(gathered, off, size), at(room, off, size // ranks)
            return lambda: dist.all_gather_into_tensor(into, tensor)

        for off in OFFSETS:
            tensor = at(room, off, size)
            pattern = torch.arange(tensor.numel(), device="cuda").remainder(64).half()
            tensor.copy_(pattern + rank)
            dist.all_reduce(tensor)
            wrong += int((tensor != ranks * pattern + sum(range(ranks))).sum())
            part = at(room, off, size // ranks)
            part.fill_(rank + 1)
            into = at(gathered, off, size)
            dist.all_gather_into_tensor(into, part)
            wrong += sum(int((piece != each + 1).sum()) for each, piece in enumerate(into.chunk(ranks)))
            checks += 2
        room.zero_()
        for operation, call in (("all_reduce", reduce), ("all_gather", gather)):
            kinds = seconds.setdefault(operation, {}).setdefault(str(size), {})
            for turn in range(rounds + 1):
                for off in OFFSETS:
                    took = timed(call(off))
                    if turn:
                        kinds.setdefault(str(off), []).append(took)
                with guarded(policy="copy", alignment=ALIGNMENT):
                    took = timed(call(2))
                if turn:
                    kinds.setdefault("guarded", []).append(took)
    told = torch.tensor([wrong], device="cuda")
    dist.all_reduce(told)
    if rank == 0:
        print(json.dumps({"checks": checks * ranks, "wrong": int(told), "seconds": seconds}), flush=True)
    dist.destroy_process_group()
    return 0


def timed(call: Callable[[], None]) -> float:
    """Seconds a call, by the GPU's own clock, over CALLS of them."""
    import torch

    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    torch.cuda.synchronize()
    begun.record()
    for _ in range(CALLS):
        call()
    ended.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3 / CALLS


if __name__ == "__main__":
    sys.exit(main())
