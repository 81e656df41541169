"""What each recorder costs a worker: a step loop of two gloo ranks, with and without it, interleaved.

    python benchmarks/probes.py [--pairs 60] [--seconds 0.5] [--whole 5] [--only proc,strace]

Light recorders run beside the same two processes all the time, and see them or not, in pairs of stretches of random order:
that leaves out what differs between two starts. `default` is all of those that every run has. Heavy ones, and once more
`default` with its hook against ranks without, are pairs of whole jobs, ten times as long. Each rank's flight recorder is full (2000
entries), its dearest state. Recorders have a budget of processor time, and here spend it in the half of the time in which
they see something: the cost of a light one is up to twice the true one. Prints the median of the ratios over the pairs, of wall time and of the ranks' processor time, each with its 95 % bootstrap
interval: on a machine with other work the processor time says more. The last columns are the recorders' own processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dtprobe import stats
from dtprobe.probes import RankProcess, Recorded, Where
from dtprobe.probes.bpf import Bpf
from dtprobe.probes.flight_recorder import FlightRecorder
from dtprobe.probes.inotify import Inotify
from dtprobe.probes.logs import Logs
from dtprobe.probes.perf import Perf
from dtprobe.probes.proc import Proc
from dtprobe.probes.pyspy import PySpy
from dtprobe.probes.strace import Strace

WORKER = """
import json, os, sys, time
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=int(os.environ["RANK"]), world_size=2)
a, grad = torch.randn(256, 256), torch.ones(65536)
for _ in range(2200):
    dist.all_reduce(grad[:1])
def step():
    for _ in range(8):
        a @ a
    dist.all_reduce(grad)
print("ready", flush=True)
for line in sys.stdin:
    steps = int(line)
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]), flush=True)
"""
NCCL_WORKER = """
import json, os, sys, time
import torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method="file://" + os.environ["STORE"], rank=rank, world_size=2)
data = torch.ones(256, device="cuda")
layers = [torch.nn.Linear(256, 256) for _ in range(8)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda())
batch = torch.ones(64, 256, device="cuda")
def all_reduce():
    dist.all_reduce(data)
def ddp():
    model.zero_grad()
    model(batch).sum().backward()
step = {"all_reduce": all_reduce, "ddp": ddp}[os.environ["STEP"]]
for _ in range(2200):
    dist.all_reduce(data)
for _ in range(20):
    step()
torch.cuda.synchronize()
print("ready", flush=True)
for line in sys.stdin:
    steps = int(line)
    dist.barrier()
    torch.cuda.synchronize()
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]), flush=True)
"""
WORLD_SIZE = 2
LIMIT_S = 120


@dataclass(frozen=True)
class Program:
    """What each rank runs, and with which variables."""

    text: str
    environ: Mapping[str, str] = field(default_factory=dict)


GLOO = Program(WORKER)
SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
NCCL = {step: Program(NCCL_WORKER, {**SAFE, "STEP": step}) for step in ("all_reduce", "ddp")}
"""Two GPUs, by what a step is."""
DEFAULT = (Proc(), FlightRecorder(), PySpy(), Logs())
LIGHT: dict[str, tuple[Any, ...]] = {
    **{probe.name: (probe,) for probe in DEFAULT},
    "inotify": (Inotify(),),
    "default": DEFAULT,
}
WHOLE: dict[str, tuple[Any, ...]] = {
    "default, with its hook": DEFAULT,
    "strace clone,clone3": (Strace(calls="clone,clone3"),),
    "strace futex,mmap,munmap,close": (Strace(calls="futex,mmap,munmap,close"),),
    "perf": (Perf(),),
    "bpf": (Bpf(),),
}


@dataclass
class Job:
    """Two ranks that run stretches of steps when told."""

    where: Where
    ranks: list[subprocess.Popen[str]]
    visible: bool = True
    """Whether recorders see the ranks."""

    def processes(self) -> list[RankProcess]:
        if not self.visible:
            return []
        return [RankProcess(rank, one.pid, self.where.rank_folder(rank)) for rank, one in enumerate(self.ranks)]

    def stretch(self, steps: int) -> tuple[float, float]:
        """(wall time of the slower rank, processor time of both) in seconds."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        said = [json.loads(self._line(rank)) for rank in self.ranks]
        return max(wall for wall, _ in said), sum(cpu for _, cpu in said)

    def served_s(self) -> float:
        """Processor time of the threads that answer the flight recorder's questions, of both ranks."""
        spent_ns = 0
        for rank in self.ranks:
            for thread in Path(f"/proc/{rank.pid}/task").iterdir():
                if (thread / "comm").read_text() == "pt_workerserver\n":
                    spent_ns += int((thread / "schedstat").read_text().split()[0])
        return spent_ns / 1e9

    def ready(self) -> None:
        for rank in self.ranks:
            self._line(rank)

    def _line(self, rank: subprocess.Popen[str]) -> str:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if not line:
            sys.exit(f"a rank ended with {rank.wait(LIMIT_S)}; see its stderr above")
        return line


@contextmanager
def job(probes: Sequence[Any], program: Program = GLOO) -> Iterator[tuple[Job, list[Any]]]:
    """A job with the recorders' wrapping and environment, and the recorders, not started."""
    with tempfile.TemporaryDirectory(prefix="dtp") as name:
        folder = Path(name)
        (folder / "worker.py").write_text(program.text, encoding="utf-8")
        ranks: list[subprocess.Popen[str]] = []
        made: Job | None = None
        where = Where(
            folder=folder,
            scratch=folder,
            world_size=WORLD_SIZE,
            processes=lambda: made.processes() if made else [],
            suspect=lambda reason: print(f"suspected: {reason}", file=sys.stderr),
            environ=os.environ,
        )
        recorders = [probe.recorder(where) for probe in probes]
        try:
            for rank in range(WORLD_SIZE):
                where.rank_folder(rank).mkdir()
                argv: tuple[str, ...] = (sys.executable, str(folder / "worker.py"))
                environ = {
                    **os.environ,
                    "RANK": str(rank),
                    "STORE": str(folder / "store"),
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "DTPROBE_RANK_FOLDER": str(where.rank_folder(rank)),
                    **program.environ,
                }
                for recorder in recorders:
                    argv = recorder.wrap(rank, argv)
                    environ |= recorder.environ(rank)
                ranks.append(subprocess.Popen(argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            made = Job(where, ranks)
            made.ready()
            yield made, recorders
        finally:
            for one in ranks:
                one.kill()
                one.communicate()


@contextmanager
def recording(one: Job, recorders: Sequence[Any]) -> Iterator[list[Recorded]]:
    """Recorders at work; what they recorded is in the list afterwards."""
    recorded: list[Recorded] = []
    for recorder in recorders:
        recorder.start(one.processes())
    try:
        yield recorded
    finally:
        one.visible = True
        recorded += [recorder.stop() for recorder in recorders]


@dataclass
class Cost:
    """Pairs of one recorder."""

    name: str
    wall: list[float]
    cpu: list[float]
    own: list[float]
    """The recorder's own processor time as a share of one core."""
    served: list[float]
    """The same of the threads that it has in the ranks, of one rank's core."""
    said: dict[str, None]
    step_s: list[float] = field(default_factory=list)
    """Of a step without the recorder."""

    def pair(self, bare: tuple[float, float], probed: tuple[float, float], steps: int) -> None:
        self.step_s.append(bare[0] / steps)
        self.wall.append(probed[0] / bare[0])
        self.cpu.append(probed[1] / bare[1])

    def recorded(self, recorded: Sequence[Recorded], served_s: float, seconds: float) -> None:
        self.own.append(sum(one.cpu_s for one in recorded) / seconds)
        self.served.append(served_s / WORLD_SIZE / seconds)
        self.said.update((text, None) for one in recorded for text in (*one.facts.values(), *one.problems))


def steps_for(seconds: float, one: Job) -> int:
    one.stretch(20)
    return max(10, int(100 * seconds / one.stretch(100)[0]))


def light(
    name: str, probes: Sequence[Any], pairs: int, seconds: float, rng: random.Random, tick: Any, program: Program = GLOO
) -> Cost:
    cost = Cost(name, [], [], [], [], {})
    with job(probes, program) as (one, recorders):
        steps = steps_for(seconds, one)
        lasted_s, before_s = 0.0, one.served_s()
        with recording(one, recorders) as recorded:
            for _ in range(pairs):
                took = {}
                for one.visible in rng.sample((False, True), 2):
                    took[one.visible] = one.stretch(steps)
                cost.pair(took[False], took[True], steps)
                lasted_s += took[False][0] + took[True][0]
                tick()
        cost.recorded(recorded, one.served_s() - before_s, lasted_s)
    return cost


def whole(
    name: str, probes: Sequence[Any], pairs: int, seconds: float, rng: random.Random, tick: Any, program: Program = GLOO
) -> Cost:
    cost = Cost(name, [], [], [], [], {})
    steps = 0
    for _ in range(pairs):
        took = {}
        for probed in rng.sample((False, True), 2):
            with job(probes if probed else (), program) as (one, recorders):
                steps = steps or steps_for(10 * seconds, one)
                before_s = one.served_s()
                with recording(one, recorders) as recorded:
                    took[probed] = one.stretch(steps)
                if probed:
                    cost.recorded(recorded, one.served_s() - before_s, took[True][0])
        cost.pair(took[False], took[True], steps)
        tick()
    return cost


def percent(ratios: Sequence[float], base: float = 1.0) -> str:
    found = stats.measured([100 * (ratio - base) for ratio in ratios])
    return f"{found.value:+.2f} % [{found.low:+.2f}, {found.high:+.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of stretches for each light recorder")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a stretch")
    parser.add_argument("--whole", type=int, default=5, help="pairs of whole jobs")
    parser.add_argument("--only", default="", help="names, separated by commas; all without it")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chosen = {name for name in arguments.only.split(",") if name}
    rng = random.Random(arguments.seed)
    console, began = Console(), time.monotonic()
    table = Table(
        "recorder",
        "n",
        "wall time",
        "ranks' processor time",
        "own, of a core",
        "its threads, of a rank's core",
        title="Cost to two gloo ranks",
    )
    said: dict[str, dict[str, None]] = {}
    kinds = [(light, name, probes, arguments.pairs) for name, probes in LIGHT.items()]
    kinds += [(whole, name, probes, arguments.whole) for name, probes in WHOLE.items()]
    with Progress(console=console, transient=True) as progress:
        for measure, name, probes, pairs in kinds:
            if (chosen and name not in chosen and name.split()[0].rstrip(",") not in chosen) or pairs < 1:
                continue
            if why := next((why for probe in probes if (why := probe.probe())), None):
                table.add_row(name, "0", f"unavailable: {why}", "", "", "")
                continue
            task = progress.add_task(name, total=pairs)
            cost = measure(name, probes, pairs, arguments.seconds, rng, lambda task=task: progress.advance(task))
            shares = (percent(cost.own, 0), percent(cost.served, 0))
            table.add_row(name, str(len(cost.wall)), percent(cost.wall), percent(cost.cpu), *shares)
            said[name] = cost.said
    console.print(table)
    for name, texts in said.items():
        if texts:
            console.print(f"{name}: {'; '.join(list(texts)[:3])}", highlight=False)
    load = os.getloadavg()[0]
    console.print(f"{os.cpu_count()} cores, load {load:.1f}, {time.monotonic() - began:.0f} s", highlight=False)


if __name__ == "__main__":
    main()
