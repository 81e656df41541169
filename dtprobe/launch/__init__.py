"""Launchers: one a module, each starts the ranks of a job inside a confinement and says how each ended.

A rank's folder is `<arm run>/rank<k>/`: `stdout.log`, `stderr.log` and `process.json` (`{"rank", "pid", "host", "argv",
"started_ns"}`). What a launcher program says itself lies in `<arm run>/launcher/`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dtprobe.confine import Confinement
from dtprobe.errors import DtprobeError, Unavailable, UsageError
from dtprobe.probes import RankProcess

if TYPE_CHECKING:
    from dtprobe.armrun import ArmPlan, ArmRecord
    from dtprobe.clock import Clock
    from dtprobe.scenario import Probe

LAUNCHERS: Mapping[str, str] = {
    "local": "local:Local",
    "torchrun": "torchrun:Torchrun",
    "command": "command:Command",
    "hosts": "hosts:OnHosts",
    "slurm": "srun:OnSlurm",
}
"""Name -> module and class. Those that spread ranks over nodes may be given how many: `hosts:3`."""

NODES_MAX = 1024

LOOPBACK = "127.0.0.1"
RANK_FOLDER = "DTPROBE_RANK_FOLDER"
FROM_A_LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "PET_", "ROLE_", "GROUP_")


def _as_it_is(rank: int | None, argv: tuple[str, ...]) -> tuple[str, ...]:
    return argv


def _nothing(rank: int | None) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What to launch: `argv` on each of `world_size` ranks.

    `env` is the whole environment before the launcher's own variables. `wrap` may put a recorder's command in front of a
    rank's argv, `environ` add variables to a rank; both are asked once a rank, or once with None for a foreign command.
    `folder` is the arm run's.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    world_size: int
    folder: Path
    cwd: Path
    wrap: Callable[[int | None, tuple[str, ...]], tuple[str, ...]] = _as_it_is
    environ: Callable[[int | None], Mapping[str, str]] = _nothing


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How a rank ended. `exit_code` and `signal` are both None while it runs, or where nobody could see its end.

    `wall_s` counts from its release, `cpu_s` is user and system time with the children it waited for. `timed_out`: it still
    ran at the deadline. `pid` is None for a rank that never came up, `rank` for a foreign command as a whole.
    """

    rank: int | None
    pid: int | None
    exit_code: int | None
    signal: int | None
    wall_s: float
    cpu_s: float
    timed_out: bool = False


class Job(Protocol):
    """A job under way."""

    def processes(self) -> Sequence[RankProcess]:
        """The ranks known at this moment, and the launcher's own process (rank None) where there is one."""

    def release(self) -> None:
        """Let the held processes go. Raises DtprobeError (`cannot execute ...`)."""

    def wait(self, deadline_s: float, tick: Callable[[], None] | None = None) -> list[RankExit]:
        """Until every rank has ended, or at most so long; ends nothing. `tick` is called about twenty times a second."""

    def end(self) -> list[RankExit]:
        """End what still runs, with all it left behind; how each rank ended."""


class Launcher(Protocol):
    """A way to start a job."""

    @property
    def name(self) -> str: ...

    def probe(self) -> Unavailable | None:
        """None where it can launch here, else why not."""

    def start(self, box: Confinement, spec: JobSpec) -> Job:
        """Create the job's processes, held before their programs. Raises DtprobeError."""


@runtime_checkable
class Spread(Protocol):
    """A launcher whose ranks run on several nodes, each with its recorders beside it: it runs the whole of an arm by itself."""

    @property
    def nodes(self) -> int: ...

    def probe(self) -> Unavailable | None:
        """None where it can launch here, else why not."""

    def conduct(
        self,
        box: Confinement,
        plan: ArmPlan,
        *,
        folder: Path,
        probes: Sequence[Probe],
        seed: int,
        environ: Mapping[str, str],
        clock: Clock,
    ) -> ArmRecord:
        """As `armrun.execute`, over nodes."""


def named(name: str) -> Launcher | Spread:
    """The launcher of that name with its defaults, or `name:nodes`. Raises UsageError for an unknown one."""
    bare, colon, count = name.partition(":")
    home = LAUNCHERS.get(bare)
    if home is None:
        raise UsageError(f"no launcher {name!r}", f"there are {', '.join(LAUNCHERS)}")
    module, _, attribute = home.partition(":")
    kind = getattr(import_module(f"dtprobe.launch.{module}"), attribute)
    if not colon:
        return kind()
    if not hasattr(kind, "conduct"):
        raise UsageError(f"launcher {name!r}: {bare} has one node", f"write {bare}, or hosts:{count or 2}")
    if not count.isdecimal() or not 1 <= int(count) <= NODES_MAX:
        raise UsageError(f"launcher {name!r}: {count!r} is no number of nodes from 1 to {NODES_MAX}", f"write {bare}:2")
    return kind(nodes=int(count))


def environment(box: Confinement, spec: JobSpec) -> dict[str, str]:
    """The variables that all ranks of a job share: the caller's, without a surrounding launcher's, and safe defaults.

    Loopback, one thread and unbuffered output are defaults, which the caller may set otherwise. Temporary files go to
    the run's own folder.
    """
    kept = {
        name: value
        for name, value in spec.env.items()
        if name not in FROM_A_LAUNCHER and not name.startswith(LAUNCHER_PREFIXES)
    }
    defaults = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # each connection to a TCPStore asks a DNS server for ::ffff:127.0.0.1, and waits 5 s for a lost answer (torch 2.13)
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    return {**defaults, **kept, "TMPDIR": str(box.scratch)}


def rank_folder(spec: JobSpec, rank: int) -> Path:
    """Make and answer the folder of a rank."""
    folder = spec.folder / f"rank{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_process(folder: Path, rank: int, pid: int, argv: Sequence[str], started_ns: int, host: str | None = None) -> None:
    """Write `process.json` at one stroke: whoever sees the file sees all of it. `host` is this machine's name where not given."""
    said = {"rank": rank, "pid": pid, "host": host or os.uname().nodename, "argv": list(argv), "started_ns": started_ns}
    text = json.dumps(said, indent=1)
    temporary = folder / ".process.json"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(folder / "process.json")


def check_program(argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
    """Raise DtprobeError where the program of a job is missing: a recorder in front of it would say it less clearly."""
    program = argv[0]
    there = (cwd / program).is_file() if "/" in program else shutil.which(program, path=env.get("PATH")) is not None
    if not there:
        raise DtprobeError(f"cannot execute {program}: No such file or directory")
    if "/" in program and not os.access(cwd / program, os.X_OK):
        raise DtprobeError(f"cannot execute {program}: Permission denied")


class ReservedPort:
    """A free port, kept from everyone but who binds it by number with SO_REUSEADDR, as torch's stores do.

    A port that is merely looked up can be taken by anyone before the job binds it. Here a bound socket stays, which keeps
    the kernel from handing the port out; SO_REUSEADDR, set after the bind, lets the job's server bind beside it (Linux
    allows that while neither listens; the server then listens alone). It is bound on every address, as torch's stores listen: what
    another process gets on one address alone (NCCL on that of a network card) would be in a store's way too.
    """

    def __init__(self) -> None:
        self._holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._holder.bind(("", 0))
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.number: int = self._holder.getsockname()[1]

    def close(self) -> None:
        self._holder.close()
