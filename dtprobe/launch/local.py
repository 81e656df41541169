"""The local launcher: one process a rank on this machine, placement in environment variables, loopback only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
        common = environment(box, spec)
        check_program(spec.argv, common, spec.cwd)
        port = ReservedPort()
        job = LocalJob(box, spec, port, self.clock)
        try:
            for rank in range(spec.world_size):
                folder = rank_folder(spec, rank)
                argv = spec.wrap(rank, spec.argv)
                env = {
                    **common,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(spec.world_size),
                    "LOCAL_WORLD_SIZE": str(spec.world_size),
                    "MASTER_ADDR": LOOPBACK,
                    "MASTER_PORT": str(port.number),
                    **spec.environ(rank),
                    RANK_FOLDER: str(folder),
                }
                child = box.spawn(argv, env=env, cwd=spec.cwd, stdout=folder / "stdout.log", stderr=folder / "stderr.log")
                write_process(folder, rank, child.pid, argv, self.clock.now_ns())
                job.children[rank] = child
        except BaseException:
            job.end()
            raise
        return job


class LocalJob:
    """Ranks started by `Local`."""

    def __init__(self, box: Confinement, spec: JobSpec, port: ReservedPort, clock: Clock) -> None:
        self.children: dict[int, Child] = {}
        self._box = box
        self._spec = spec
        self._port = port
        self._clock = clock
        self._late: set[int] = set()

    def processes(self) -> Sequence[RankProcess]:
        return [RankProcess(rank, child.pid, self._spec.folder / f"rank{rank}") for rank, child in self.children.items()]

    def release(self) -> None:
        for child in self.children.values():
            self._box.release(child)

    def wait(self, deadline_s: float, tick: Callable[[], None] | None = None) -> list[RankExit]:
        give_up = self._clock.monotonic() + deadline_s
        while running := self._running():
            left_s = give_up - self._clock.monotonic()
            if left_s <= 0:
                self._late = set(running)
                break
            self._box.wait(self.children[running[0]], min(TICK_S, left_s))
            if tick is not None:
                tick()
        return self._exits()

    def end(self) -> list[RankExit]:
        for problem in self._box.kill_all():
            self._box.problems.append(problem)
        self._port.close()
        for child in self.children.values():
            self._box.wait(child, timeout_s=1)
        return self._exits()

    def _running(self) -> list[int]:
        return [rank for rank, child in self.children.items() if self._box.poll(child) is None]

    def _exits(self) -> list[RankExit]:
        found = []
        for rank, child in self.children.items():
            ended = self._box.poll(child)
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
