"""Many starts of small jobs over store files: after a job that was killed, or two jobs at a time on one path.

Each start is a job of two processes of its own, forked from this one so that a dozen of them cost less than one import of
torch. Cases: `after` starts each job where an earlier one has been (`--first ended` properly, or `--first killed`), `beside`
starts two jobs at once (`--paths own`, or `--paths one` for both). `--store safe` uses the framework's file store.

By hand: `python starts.py --case after --first killed`
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
import torch.distributed as dist

from dtprobe import record

FORK = multiprocessing.get_context("fork")
RANKS = 2
JITTER_S = 0.01
"""Ranks of a job never start quite together; seeded."""

TURN_S = 0.2
"""How long a trial has the machine for itself before the next one sets out."""

STORE_S = 10.0
"""How long ranks wait for each other in the store: their start is not what is late here, busy as the machine may be."""

MESH_FACTOR = 5
"""gloo's mesh connect waits five times the group's timeout."""


@dataclass(frozen=True)
class Job:
    """A job to start: rank k contributes `values[k]` to one all-reduce. `run` and `attempt` only matter to the safe store."""

    folder: Path
    name: str
    values: tuple[float, float]
    run: str = "job"
    attempt: int = 0

    @property
    def expected(self) -> float:
        return sum(self.values)


@dataclass
class Started:
    """The processes of a job that was started, and the pipes on which they answer."""

    job: Job
    processes: list[BaseProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def answers(self, deadline: float) -> list[dict[str, object]]:
        """What each rank says, within the deadline of the monotonic clock; a rank that says nothing then is hung."""
        found = []
        for pipe in self.pipes:
            came = pipe.poll(max(0.0, deadline - time.monotonic()))
            try:
                found.append(pipe.recv() if came else {"error": "no answer"})
            except EOFError:
                found.append({"error": "died"})
        return found

    def answered(self) -> bool:
        """Whether every rank has something to say."""
        return all(pipe.poll(0) for pipe in self.pipes)

    def end(self, *, kill: bool) -> None:
        for process in self.processes:
            if kill:
                process.kill()
            process.join(5)
            if process.exitcode is None:
                process.kill()
                process.join()


@contextlib.contextmanager
def store_of(kind: str, job: Job, rank: int) -> Iterator[dist.Store]:
    if kind == "safe":
        from dtprobe.framework.filestore import SafeFileStore

        with SafeFileStore(
            job.folder, run=job.run, attempt=job.attempt, rank=rank, world_size=RANKS, timeout_s=STORE_S
        ) as store:
            yield store
        return
    store = dist.FileStore(str(job.folder / "store"), RANKS)
    store.set_timeout(timedelta(seconds=STORE_S))
    yield store


def be_rank(
    job: Job, rank: int, go: Event, delay_s: float, kind: str, timeout_s: float, stay: bool, answer: Connection
) -> None:
    """A rank of a started job: join, reduce once, say what came out."""
    go.wait()
    time.sleep(delay_s)
    began = time.monotonic()
    said: dict[str, object] = {}
    try:
        with store_of(kind, job, rank) as store:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=timeout_s))
            value = torch.tensor([job.values[rank]])
            dist.all_reduce(value)
            said = {"sum": value.item(), "duration_s": time.monotonic() - began}
            answer.send(said)
            if stay:
                time.sleep(600)  # until it is killed
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001  whatever a start raises is the observation
        if not said:
            answer.send({"error": f"{type(error).__name__}: {error}"[:300], "duration_s": time.monotonic() - began})
        os._exit(1)


def start(job: Job, go: Event, delays: tuple[float, float], kind: str, timeout_s: float, *, stay: bool = False) -> Started:
    """Make the processes of a job; they set out when `go` is set, each after its delay (seconds)."""
    started = Started(job)
    for rank in range(RANKS):
        ours, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=be_rank, args=(job, rank, go, delays[rank], kind, timeout_s, stay, theirs))
        process.start()
        theirs.close()
        started.processes.append(process)
        started.pipes.append(ours)
    return started


def judge_start(started: Started, trial: int, answers: list[dict[str, object]]) -> None:
    """Record what each rank of a start got, against what it should have."""
    for rank, said in enumerate(answers):
        record(
            "start",
            trial=trial,
            job=started.job.name,
            job_rank=rank,
            sum=said.get("sum"),
            expected=started.job.expected,
            error=said.get("error"),
            duration_s=said.get("duration_s"),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=("after", "beside"), default="after")
    parser.add_argument("--first", choices=("ended", "killed"), default="ended")
    parser.add_argument("--paths", choices=("own", "one"), default="own")
    parser.add_argument("--store", choices=("torch", "safe"), default="torch")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--timeout-s", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("DTPROBE_SEED", "0")))
    args = parser.parse_args()
    own = os.environ.get("DTPROBE_RANK_FOLDER")
    shared = Path(own).parent / "shared" if own else Path(tempfile.mkdtemp(prefix="filestore-"))
    rng = random.Random(args.seed)

    def delays() -> tuple[float, float]:
        return rng.uniform(0, JITTER_S), rng.uniform(0, JITTER_S)

    def folder(trial: int, name: str = "") -> Path:
        made = shared / f"{trial}{name}"
        made.mkdir(parents=True, exist_ok=True)
        return made

    if args.case == "after":
        leave_behind(args, [folder(n) for n in range(args.trials)])
        trials = [[Job(folder(n), "second", (1, 2), attempt=1)] for n in range(args.trials)]
    else:
        names = (("a", (1.0, 2.0)), ("b", (100.0, 200.0)))
        trials = [
            [Job(folder(n, name if args.paths == "own" else ""), name, values, run=name) for name, values in names]
            for n in range(args.trials)
        ]
    began = time.monotonic()
    started: list[list[Started]] = []
    for jobs in trials:
        go = FORK.Event()
        started.append([start(job, go, delays(), args.store, args.timeout_s) for job in jobs])
        go.set()
        turn_ends = time.monotonic() + TURN_S
        while time.monotonic() < turn_ends and not all(one.answered() for one in started[-1]):
            time.sleep(0.005)
    deadline = time.monotonic() + max(MESH_FACTOR * args.timeout_s + 3, STORE_S)
    for n, trial in enumerate(started):
        for one in trial:
            judge_start(one, n, one.answers(deadline))
    record("work", duration_s=time.monotonic() - began)
    for one in itertools.chain.from_iterable(started):
        one.end(kill=False)


def leave_behind(args: argparse.Namespace, folders: list[Path]) -> None:
    """Run a first job in each folder, which ends properly or is killed."""
    killed = args.first == "killed"
    go = FORK.Event()
    first = [start(Job(one, "first", (1, 2)), go, (0, 0), args.store, 10, stay=killed) for one in folders]
    go.set()
    for n, one in enumerate(first):
        answers = one.answers(time.monotonic() + 10)
        one.end(kill=killed)
        record("first", trial=n, ok=all("sum" in said for said in answers), killed=killed)


if __name__ == "__main__":
    main()
