"""Recorders of raw artifacts: one a module, all with the same two moments, `start` and `stop`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class RankProcess:
    """A rank of the running job. `folder` is where its raw artifacts go; `rank` is None for a launcher's own process."""

    rank: int | None
    pid: int
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Where:
    """One arm run, as a recorder sees it.

    `world_size` is None for a foreign command that does not say. `folder` is `<run>/<arm>/<repeat>`, `scratch` a private temporary folder that vanishes after the run (sockets, say).
    `processes()` answers the ranks known at this moment: all of them from the start under the local launcher, as they
    appear under torchrun. `suspect(reason)` tells every recorder of this arm run that a hang is suspected. `environ` is for programs
    that a recorder starts by itself: it carries the run's marker, by which they are ended when the harness dies. `elsewhere` are ranks of
    the job on other hosts, whose own recorders see them.
    """

    folder: Path
    scratch: Path
    world_size: int | None
    processes: Callable[[], Sequence[RankProcess]]
    suspect: Callable[[str], None]
    environ: Mapping[str, str]
    elsewhere: frozenset[int] = frozenset()

    def rank_folder(self, rank: int) -> Path:
        return self.folder / f"rank{rank}"


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a recorder did: files it wrote, its own processor time, how long it stopped the ranks, and what went wrong."""

    files: tuple[Path, ...] = ()
    cpu_s: float = 0.0
    stopped_s: float = 0.0
    problems: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


class Recorder:
    """Base of all recorders; every method may be left as it is.

    Order of calls for one arm run: `wrap` and `environ` for each rank, then the processes are created but held before
    their program starts, then `start`, then they are let go; `suspected` any number of times from any thread; `stop` once, also when
    `start` raised. `stop` must return within 10 s whatever state the ranks are in (stopped, dead, unkillable).
    """

    def wrap(self, rank: int | None, argv: tuple[str, ...]) -> tuple[str, ...]:
        """The command for this rank, perhaps with a recorder's own command in front; its pid must stay the rank's.

        `rank` is None for the launcher's own command of a foreign job, here and in `environ`.
        """
        return argv

    def environ(self, rank: int | None) -> Mapping[str, str]:
        """Variables to add to this rank's environment."""
        return {}

    def start(self, processes: Sequence[RankProcess]) -> None:
        """Begin to record; the ranks exist and wait. Under a launcher such as torchrun only its own process exists yet."""

    def suspected(self, reason: str) -> None:
        """A hang is suspected: take what is worth taking now. Must not block for more than a few seconds."""

    def stop(self) -> Recorded:
        """End the recording and say what it was."""
        return Recorded()
