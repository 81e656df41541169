"""Every NCCL fault on real NCCL: what the ranks see, how long it takes, what fired and what the ring says while it lasts.

    python benchmarks/nccl_faults.py [--gpus 2] [--only hole,drop] [--repeats 1] [--jobs 1] [--json FILE]

Each case is a `torchrun` of its own with its own limit; one at a time they take about 10 minutes on two GPUs. In the `restart` cases rank 1
ends before the first collective of the first attempt, and the second attempt of `torchrun --max-restarts=1` counts: with the store of the first one, without
it, and with `dtprobe.framework.bootstrap`.
From a checkout that is not installed: PYTHONPATH=. in front.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from _ranks import free_port
from rich.console import Console
from rich.table import Table

from dtprobe import catalog
from dtprobe.errors import Unavailable
from dtprobe.inject.spec import parse
from dtprobe.readers.nccl_ring import read_nccl_ring

LIMIT_S = 60
LOOK_S = 4
"""After the first fault that fired, the rings are looked at."""
STEPS = 12
FAILS_FIRST = "FAILS_FIRST"
"""Variable of the restart cases' ranks."""
CASES = {
    "healthy": (),
    **{
        f"init-{name}": (f"nccl:fail,rank=1,call=init,result={name}",)
        for name in ("ncclSystemError", "ncclInvalidArgument", "ncclInvalidUsage")
    },
    **{
        f"call-{name}": (f"nccl:fail,rank=1,call=ncclAllReduce,nth=4,result={name}",)
        for name in ("ncclUnhandledCudaError", "ncclInternalError", "ncclRemoteError")
    },
    "async": ("nccl:async_error,rank=1,call=ncclAllReduce,nth=4,result=ncclRemoteError",),
    "delay": ("nccl:delay,rank=1,call=ncclAllReduce,seconds=0.5",),
    "delay-stream": ("nccl:delay,rank=1,call=ncclAllReduce,seconds=0.5,where=stream",),
    "drop": ("nccl:drop,rank=1,call=ncclAllReduce,nth=4",),
    "count": ("nccl:count,rank=1,call=ncclAllReduce,nth=4",),
    "op": ("nccl:op,rank=1,call=ncclAllReduce,nth=4,redop=max",),
    "root": ("nccl:root,rank=1,call=ncclBroadcast,nth=4",),
    "block": ("nccl:block,rank=1,call=ncclAllReduce,nth=4",),
    "block-released": ("nccl:block,call=ncclAllReduce,nth=4,for_s=3",),
    "hole": ("nccl:block,call=ncclAllReduce,nth=4,where=stream",),
    "hole-released": ("nccl:block,call=ncclAllReduce,nth=4,where=stream,for_s=3",),
}


@dataclass(frozen=True)
class Restart:
    """torchrun's rendezvous, further variables, and whether `dtprobe.framework.bootstrap` makes the group."""

    launch: tuple[str, ...] = ("--standalone",)
    environ: Mapping[str, str] = field(default_factory=dict)
    cured: bool = False


RESTARTS = {
    "restart-static": Restart(("--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1")),
    "restart": Restart(),
    "restart-unshared": Restart(environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    "restart-cured": Restart(cured=True),
}
"""Cases in which the first attempt fails before NCCL's first call has ended."""
ALL = (*CASES, *RESTARTS)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gpus", type=int, default=2)
    options.add_argument("--only", default="", help="cases, comma separated: " + ", ".join(ALL))
    options.add_argument("--repeats", type=int, default=1)
    options.add_argument("--jobs", type=int, default=1, help="cases at a time; more than one makes times less exact")
    options.add_argument("--json", type=Path, help="also write the rows here")
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.worker:
        return worker()
    names = [name for name in chosen.only.split(",") if name] or list(ALL)
    if odd := [name for name in names if name not in ALL]:
        options.error(f"no such case: {', '.join(odd)}")
    known, _ = catalog.injectors()
    module = sys.modules["_dtprobe_injector_nccl"]
    shown = Table("case", "exit", "s", "fired (rank, call, nth)", f"ring {LOOK_S} s after that", "last words")
    with tempfile.TemporaryDirectory() as scratch:
        shim = module.build.shim(folder=Path(scratch))
        if isinstance(shim, Unavailable):
            sys.exit(str(shim))

        def run(turn: tuple[str, int]) -> dict[str, Any]:
            name, repeat = turn
            place = Path(scratch, f"{name}-{repeat}")
            lines = [
                module.plan_line(parse(text, known, world_size=chosen.gpus), 1, i) for i, text in enumerate(CASES.get(name, ()))
            ]
            row = {"case": name, **one(module, shim, place, lines, chosen.gpus, name)}
            print(json.dumps(row), file=sys.stderr, flush=True)
            return row

        with ThreadPoolExecutor(chosen.jobs) as pool:
            rows = list(pool.map(run, [(name, repeat) for name in names for repeat in range(chosen.repeats)]))
    for row in rows:
        shown.add_row(*(str(row[key]) for key in ("case", "exit", "seconds", "fired", "ring", "words")))
    Console(width=180).print(shown)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1), "utf-8")
    return 0


def one(module: Any, shim: Path, place: Path, lines: list[str], gpus: int, name: str) -> dict[str, Any]:
    """One case from start to end."""
    arm = place / "arm"
    arm.mkdir(parents=True)
    plan = place / "plan"
    plan.write_text(module.PLAN_HEAD + "".join(f"{line}\n" for line in lines), "utf-8")
    environ = {
        **os.environ,
        **module.recording(shim, arm),
        "DTPROBE_NCCL_PLAN": str(plan),
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000",
        "OMP_NUM_THREADS": "1",
    }
    launch = ("--standalone",)
    if (restart := RESTARTS.get(name)) is not None:
        environ |= {**restart.environ, FAILS_FIRST: "cured" if restart.cured else "plain"}
        port = () if "--standalone" in restart.launch else (f"--master-port={free_port()}",)
        launch = (*restart.launch, *port, "--max-restarts=1")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", *launch, f"--nproc-per-node={gpus}", "--monitor-interval=0.1"),
        *(__file__, "--worker"),
    ]
    start = time.monotonic()
    ring, since = "", 0.0
    with (place / "out").open("w+", encoding="utf-8") as out:
        process = subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and time.monotonic() - start < LIMIT_S:
                if not since and any('"fired"' in path.read_text("ascii") for path in arm.rglob("nccl-*.jsonl")):
                    since = time.monotonic()
                if since and not ring and time.monotonic() - since > LOOK_S:
                    ring = state(arm)
                time.sleep(0.2)
        finally:
            end(process)
    seconds = time.monotonic() - start
    text = (place / "out").read_text("utf-8", "replace")
    fired = [
        [line["rank"], line["call"], line["nth"]]
        for path in sorted(arm.rglob("nccl-*.jsonl"))
        for line in map(json.loads, path.read_text("ascii").splitlines())
        if line["kind"] == "fired"
    ]
    words = [
        line.strip() for line in text.splitlines() if re.search(r"Error|step|imeout", line) and "ChildFailedError" not in line
    ]
    code = process.returncode
    return {
        "exit": "still running" if seconds >= LIMIT_S else code,
        "seconds": round(seconds, 1),
        "fired": fired[:4] + ([["...", len(fired), ""]] if len(fired) > 4 else []),
        "ring": ring or f"ended before; {state(arm)}",
        "words": [word[:160] for word in words[-2:]],
    }


def state(arm: Path) -> str:
    """Per rank: the last communication call, and what is under way."""
    told = []
    for path in sorted(arm.rglob("nccl-*.ring")):
        calls = read_nccl_ring(path)
        data = calls[calls["kind"].isin(["collective", "p2p"])]
        last = data.iloc[-1] if len(data) else None
        stuck = calls[calls["in_flight"]]["call"].tolist()
        seq = "none" if last is None else f"{last['call']} {last['seq']}"
        told.append(f"{calls['rank'].iloc[0] if len(calls) else '?'}: {seq}" + (f" in flight {stuck}" if stuck else ""))
    return "; ".join(told)


def end(process: subprocess.Popen[bytes]) -> None:
    """torchrun starts its ranks in sessions of their own: all its descendants are ended, then itself."""
    try:
        ranks = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        ranks = []
    for one in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.kill()
    process.wait()
    psutil.wait_procs(ranks, timeout=10)


def worker(environ: Mapping[str, str] = os.environ) -> int:
    """One rank: all-reduce and broadcast a step, each value checked on the host."""
    import datetime

    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=10)
    again = environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    first = FAILS_FIRST in environ and not again
    with contextlib.ExitStack() as entered:
        if environ.get(FAILS_FIRST) == "cured":
            from dtprobe.framework.bootstrap import resolve, start

            entered.enter_context(start(resolve(environ), backend="nccl", deadline_s=30, timeout_s=10))
        else:
            dist.init_process_group("nccl", timeout=limit)
        if first and dist.get_rank() == 1:
            time.sleep(2)  # rank 0 is in its first all-reduce by then, and its ncclUniqueId in the store
            os._exit(1)
        if again and dist.get_rank() == 0:
            time.sleep(0.5)  # as ranks come later that load something first
        steps(device, again)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def steps(device: Any, again: bool) -> None:
    """An all-reduce and a broadcast a step."""
    import torch
    import torch.distributed as dist

    for step in range(STEPS):
        data, told = torch.ones(512, device=device), torch.full((512,), float(dist.get_rank()), device=device)
        dist.all_reduce(data)
        dist.broadcast(told, 0)
        print(
            f"{'restarted ' * again}rank {dist.get_rank()} step {step} sum {data.sum().item()} root {told[0].item()}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
