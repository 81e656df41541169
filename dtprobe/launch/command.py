"""The launcher of a foreign command: started as it stands (a script, torchrun, mpirun, srun), its ranks found by their hook.

Each rank's first Python process writes `rank<k>/process.json` through the `process` plug-in of `dtprobe.hook`. Programs without Python
have no hook: then only the command itself is known. The command's own output is in `launcher/`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dtprobe.clock import Clock, SystemClock
from dtprobe.confine import Child, Confinement, Exit
from dtprobe.errors import Unavailable
from dtprobe.launch import JobSpec, RankExit, check_program
from dtprobe.probes import RankProcess

FOLDER = "DTPROBE_FOLDER"
"""Environment variable: the arm run's folder, in which each rank makes its own."""

PLUGIN = Path(__file__).resolve().parent.parent / "hook" / "plugins" / "process.py"
HOOK = PLUGIN.parent.parent
TICK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Command:
    """Starts somebody's command in its own environment and folder; `world_size` of the spec is what is expected, if known."""

    clock: Clock = field(default_factory=SystemClock)

    @property
    def name(self) -> str:
        return "command"

    def probe(self) -> Unavailable | None:
        return None

    def start(self, box: Confinement, spec: JobSpec) -> CommandJob:
        """Create the command, held. Raises DtprobeError for a program that does not exist."""
        check_program(spec.argv, spec.env, spec.cwd)
        folder = spec.folder / "launcher"
        folder.mkdir(parents=True, exist_ok=True)
        # The command's own variables come first in nothing: a recorder's hook has to be found before another sitecustomize.
        added = dict(spec.environ(None))
        env = {**spec.env, **added, FOLDER: str(spec.folder)}
        env["PYTHONPATH"] = ":".join(
            dict.fromkeys(
                filter(None, [str(HOOK), *added.get("PYTHONPATH", "").split(":"), *spec.env.get("PYTHONPATH", "").split(":")])
            )
        )
        env["DTPROBE_HOOKS"] = ":".join(dict.fromkeys(filter(None, [str(PLUGIN), *added.get("DTPROBE_HOOKS", "").split(":")])))
        argv = spec.wrap(None, spec.argv)
        child = box.spawn(argv, env=env, cwd=spec.cwd, stdout=folder / "stdout.log", stderr=folder / "stderr.log")
        return CommandJob(box, spec, child, self.clock)


class CommandJob:
    """A foreign command under way. It is one process to the harness; `exits` holds how it ended, with rank None."""

    def __init__(self, box: Confinement, spec: JobSpec, child: Child, clock: Clock) -> None:
        self._box = box
        self._spec = spec
        self._child = child
        self._clock = clock
        self._late = False

    @property
    def command_exit(self) -> Exit | None:
        return self._box.poll(self._child)

    def processes(self) -> Sequence[RankProcess]:
        found = [RankProcess(None, self._child.pid, self._spec.folder / "launcher")]
        for file in sorted(self._spec.folder.glob("rank*/process.json")):
            said = json.loads(file.read_text(encoding="utf-8"))
            found.append(RankProcess(int(said["rank"]), int(said["pid"]), file.parent))
        return found

    def release(self) -> None:
        self._box.release(self._child)

    def wait(self, deadline_s: float, tick: Callable[[], None] | None = None) -> list[RankExit]:
        give_up = self._clock.monotonic() + deadline_s
        while self.command_exit is None:
            left_s = give_up - self._clock.monotonic()
            if left_s <= 0:
                self._late = True
                break
            self._box.wait(self._child, min(TICK_S, left_s))
            if tick is not None:
                tick()
        return self._exits()

    def end(self) -> list[RankExit]:
        self._box.problems += self._box.kill_all()
        self._box.wait(self._child, timeout_s=1)
        return self._exits()

    def _exits(self) -> list[RankExit]:
        ended = self.command_exit
        return [
            RankExit(
                rank=None,
                pid=self._child.pid,
                exit_code=ended.code if ended else None,
                signal=ended.signal if ended else None,
                wall_s=ended.wall_s if ended else 0.0,
                cpu_s=ended.cpu_s if ended else 0.0,
                timed_out=self._late,
            )
        ]
