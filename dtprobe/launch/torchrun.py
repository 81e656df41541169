"""The torchrun launcher: a real `python -m torch.distributed.run`, with each rank's recorders put in by a shim.

Ranks appear while the job runs; torchrun restarts them when it is told to. `rank<k>/` holds the last attempt, earlier ones
lie in `rank<k>/attempt<j>/`, and `process.json` says which attempt it is. torchrun's own output is in `launcher/`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtprobe.clock import Clock, SystemClock
from dtprobe.confine import Child, Confinement, Exit
from dtprobe.errors import Unavailable
from dtprobe.launch import LOOPBACK, RANK_FOLDER, JobSpec, RankExit, check_program, environment, rank_folder
from dtprobe.probes import RankProcess

TICK_S = 0.05
SHIM = Path(__file__).with_name("rank_shim.py")


@dataclass(frozen=True, kw_only=True)
class Torchrun:
    """One torchrun agent on this machine with all ranks as its workers.

    `rendezvous` are torchrun's own flags for it; `--standalone` lets its store bind a free port by itself, so that there is
    no moment in which another process can take the port.
    """

    max_restarts: int = 0
    rendezvous: tuple[str, ...] = ("--standalone",)
    clock: Clock = field(default_factory=SystemClock)

    @property
    def name(self) -> str:
        return "torchrun"

    def probe(self) -> Unavailable | None:
        if importlib.util.find_spec("torch") is None:
            return Unavailable("torch is not installed", "make setup, or pip install torch")
        return None

    def start(self, box: Confinement, spec: JobSpec) -> TorchrunJob:
        """Create torchrun, held; its ranks come after `release`. Raises DtprobeError for a missing program."""
        env = environment(box, spec)
        check_program(spec.argv, env, spec.cwd)
        plan = [self._part(spec, rank) for rank in range(spec.world_size)]
        folder = spec.folder / "launcher"
        folder.mkdir(parents=True, exist_ok=True)
        plan_file = folder / "plan.json"
        plan_file.write_text(json.dumps(plan, indent=1), encoding="utf-8")
        argv = [
            *(sys.executable, "-m", "torch.distributed.run", *self.rendezvous, f"--local-addr={LOOPBACK}"),
            *(f"--nproc-per-node={spec.world_size}", f"--max-restarts={self.max_restarts}"),
            *("--no-python", sys.executable, "-I", "-S", str(SHIM), str(plan_file)),
        ]
        agent = box.spawn(argv, env=env, cwd=spec.cwd, stdout=folder / "stdout.log", stderr=folder / "stderr.log")
        return TorchrunJob(box, spec, agent, self.clock)

    def _part(self, spec: JobSpec, rank: int) -> dict[str, Any]:
        folder = rank_folder(spec, rank)
        env = {**spec.environ(rank), RANK_FOLDER: str(folder)}
        return {"folder": str(folder), "argv": list(spec.wrap(rank, spec.argv)), "env": env}


class TorchrunJob:
    """A torchrun under way. `agent_exit` is how torchrun itself ended, None while it runs."""

    def __init__(self, box: Confinement, spec: JobSpec, agent: Child, clock: Clock) -> None:
        self._box = box
        self._spec = spec
        self._agent = agent
        self._clock = clock
        self._late: set[int | None] = set()

    @property
    def agent_exit(self) -> Exit | None:
        return self._box.poll(self._agent)

    def processes(self) -> Sequence[RankProcess]:
        found = [RankProcess(None, self._agent.pid, self._spec.folder / "launcher")]
        for rank in range(self._spec.world_size):
            folder = self._spec.folder / f"rank{rank}"
            if said := _read(folder / "process.json"):
                found.append(RankProcess(rank, said["pid"], folder))
        return found

    def release(self) -> None:
        self._box.release(self._agent)

    def wait(self, deadline_s: float, tick: Callable[[], None] | None = None) -> list[RankExit]:
        give_up = self._clock.monotonic() + deadline_s
        while self.agent_exit is None:
            left_s = give_up - self._clock.monotonic()
            if left_s <= 0:
                self._late = {one.rank for one in self._exits() if one.exit_code is None and one.signal is None}
                break
            self._box.wait(self._agent, min(TICK_S, left_s))
            if tick is not None:
                tick()
        return self._exits()

    def end(self) -> list[RankExit]:
        for problem in self._box.kill_all():
            self._box.problems.append(problem)
        self._box.wait(self._agent, timeout_s=1)
        return self._exits()

    def _exits(self) -> list[RankExit]:
        return [self._exit(rank) for rank in range(self._spec.world_size)]

    def _exit(self, rank: int) -> RankExit:
        folder = self._spec.folder / f"rank{rank}"
        process, said = _read(folder / "process.json"), _read(folder / "exit.json")
        pid = process["pid"] if process else None
        if said is None and pid is not None and (orphan := self._box.orphan(pid)):
            # Its shim was killed with it: the warden saw the end.
            said = {"code": orphan.code, "signal": orphan.signal, "wall_s": orphan.wall_s, "cpu_s": orphan.cpu_s}
        said = said or {"code": None, "signal": None, "wall_s": 0.0, "cpu_s": 0.0}
        return RankExit(
            rank=rank,
            pid=pid,
            exit_code=said["code"],
            signal=said["signal"],
            wall_s=said["wall_s"],
            cpu_s=said["cpu_s"],
            timed_out=rank in self._late,
        )


def _read(path: Path) -> Mapping[str, Any] | None:
    """A file that the shim wrote at one stroke, or None where it has not (yet)."""
    if not os.path.lexists(path):
        return None
    return json.loads(path.read_text(encoding="utf-8"))
