"""The local launcher: one process a rank on this machine, placement in environment variables, loopback only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dtprobe.clock import Clock, SystemClock
from dtprobe.confine import Child, Confinement
from dtprobe.errors import Unavailable
from dtprobe.launch import (
    LOOPBACK,
    RANK_FOLDER,
    JobSpec,
    RankExit,
    ReservedPort,
    check_program,
    environment,
    rank_folder,
    write_process,
)
from dtprobe.probes import RankProcess

TICK_S = 0.05
Started = TypeVar("Started", bound="LocalJob")


@dataclass(frozen=True, kw_only=True)
class Local:
    """Starts the ranks itself; nobody restarts or ends them, as under a bare `srun` or a shell loop."""

    clock: Clock = field(default_factory=SystemClock)

    @property
    def name(self) -> str:
        return "local"

    def probe(self) -> Unavailable | None:
        return None

    def start(self, box: Confinement, spec: JobSpec) -> LocalJob:
        """Create the ranks, held. Raises DtprobeError for a missing program or a folder that cannot be written."""
        port = ReservedPort()
        return start_ranks(
            LocalJob(box, spec, port, self.clock),
            range(spec.world_size),
            {
                "LOCAL_WORLD_SIZE": str(spec.world_size),
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(port.number),
            },
        )


def start_ranks(job: Started, ranks: Sequence[int], placed: Mapping[str, str]) -> Started:
    """Create these ranks of a job on this machine, held; `placed` are variables that all of them share.

    Raises DtprobeError for a missing program or a folder that cannot be written; then none of them is left.
    """
    box, spec = job.box, job.spec
    try:
        common = environment(box, spec)
        check_program(spec.argv, common, spec.cwd)
        for local_rank, rank in enumerate(ranks):
            folder = rank_folder(spec, rank)
            argv = spec.wrap(rank, spec.argv)
            env = {
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(spec.world_size),
                **placed,
                **spec.environ(rank),
                RANK_FOLDER: str(folder),
            }
            child = box.spawn(argv, env=env, cwd=spec.cwd, stdout=folder / "stdout.log", stderr=folder / "stderr.log")
            write_process(folder, rank, child.pid, argv, job.clock.now_ns(), host=job.host)
            job.children[rank] = child
    except BaseException:
        job.end()
        raise
    return job


class LocalJob:
    """Ranks of a job that run on this machine: all of them (`Local`), or one node's. `host` is what the machine is called in it."""

    def __init__(
        self, box: Confinement, spec: JobSpec, port: ReservedPort | None, clock: Clock, host: str | None = None
    ) -> None:
        self.children: dict[int, Child] = {}
        self.box = box
        self.spec = spec
        self.clock = clock
        self.host = host
        self._port = port
        self._late: set[int] = set()

    def processes(self) -> Sequence[RankProcess]:
        return [RankProcess(rank, child.pid, self.spec.folder / f"rank{rank}") for rank, child in self.children.items()]

    def release(self) -> None:
        for child in self.children.values():
            self.box.release(child)

    def wait(self, deadline_s: float, tick: Callable[[], None] | None = None) -> list[RankExit]:
        give_up = self.clock.monotonic() + deadline_s
        while running := self._running():
            left_s = give_up - self.clock.monotonic()
            if left_s <= 0:
                self._late = set(running)
                break
            self.box.wait(self.children[running[0]], min(TICK_S, left_s))
            if tick is not None:
                tick()
        return self._exits()

    def end(self) -> list[RankExit]:
        for problem in self.box.kill_all():
            self.box.problems.append(problem)
        if self._port is not None:
            self._port.close()
        for child in self.children.values():
            self.box.wait(child, timeout_s=1)
        return self._exits()

    def _running(self) -> list[int]:
        return [rank for rank, child in self.children.items() if self.box.poll(child) is None]

    def _exits(self) -> list[RankExit]:
        found = []
        for rank, child in self.children.items():
            ended = self.box.poll(child)
            found.append(
                RankExit(
                    rank=rank,
                    pid=child.pid,
                    exit_code=ended.code if ended else None,
                    signal=ended.signal if ended else None,
                    wall_s=ended.wall_s if ended else 0.0,
                    cpu_s=ended.cpu_s if ended else 0.0,
                    timed_out=rank in self._late,
                )
            )
        return found
