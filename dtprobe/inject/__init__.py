"""The injector protocol: how a fault gets into a process, a file system, a network or an environment.

An injector is a folder `injectors/<name>/` whose `injector.py` holds one module-level `Injector`. Its actions are frozen
keyword dataclasses: their fields are the parameters that the fault grammar, `--help` and the replay file know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtprobe.errors import Unavailable, UsageError
from dtprobe.probes import RankProcess
from dtprobe.scenario import LAYERS

if TYPE_CHECKING:
    from dtprobe.clock import Clock
    from dtprobe.confine import Confinement
    from dtprobe.inject.spec import Fault

TARGETS = ("rank", "node", "group", "op", "nth", "after_s", "every", "times", "probability", "for_s")
"""Keys of the grammar that say where and when; every other key is a parameter of the action."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where and when a fault fires. None means: not restricted.

    `rank` are ranks, `node` node ranks, `group` a process group's name, `op` a collective or call by name. Calls are counted
    from 1 per rank among those that match op and group: `nth` are call numbers, `every` each k-th, `times` at most that
    often, `probability` by a generator seeded with (seed, fault index, rank). `after_s` counts from the moment
    the rank's program starts; `for_s` caps how long a lasting fault stays (the undo then runs).
    """

    rank: tuple[int, ...] | None = None
    node: tuple[int, ...] | None = None
    group: str | None = None
    op: str | None = None
    nth: tuple[int, ...] | None = None
    after_s: float | None = None
    every: int | None = None
    times: int | None = None
    probability: float | None = None
    for_s: float | None = None

    def hits(self, rank: int) -> bool:
        """Whether a rank is among the targets."""
        return self.rank is None or rank in self.rank


@dataclass(frozen=True, kw_only=True)
class Firing:
    """One time that a fault really happened: when, on which rank (None: not tied to one), at which call."""

    t_ns: int
    rank: int | None = None
    call: str | None = None
    nth: int | None = None
    ended_ns: int | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where an injection works: the arm run's folder, a scratch folder that vanishes, the confinement with its undo ledger.

    `index` numbers the fault in its run; with `seed` it seeds every random choice. `processes()` answers the ranks known now.
    """

    folder: Path
    scratch: Path
    box: Confinement
    world_size: int | None
    seed: int
    index: int
    clock: Clock
    processes: Callable[[], Sequence[RankProcess]]


class Injection:
    """One fault in one arm run; every method may be left as it is.

    Order of calls: `check` (before anything is started: can this layer reach the target at all?), `prepare`, then `wrap`
    and `environ` for each rank, then the ranks are created and held, `start`, the ranks are let go, `stop` once. `stop`
    undoes what lasts and must work when the victim is dead. What must be undone although the harness is killed goes into the
    ledger of `site.box` before it is done.
    """

    def check(self) -> Unavailable | None:
        """None if the fault can reach its target here, else why not."""
        return None

    def prepare(self) -> None:
        """Build, mount, create: whatever must exist before the ranks do."""

    def wrap(self, rank: int | None, argv: tuple[str, ...]) -> tuple[str, ...]:
        """The command for a rank (None: the launcher's own command of an unmodified job)."""
        return argv

    def environ(self, rank: int | None) -> Mapping[str, str]:
        """Variables to add for a rank (None: for the launcher of an unmodified job, which hands them down)."""
        return {}

    def start(self, processes: Sequence[RankProcess]) -> None:
        """Begin; the ranks exist and are held before their program starts."""

    def stop(self) -> tuple[Firing, ...]:
        """Undo, and say when and where the fault really fired, in order of time."""
        return ()

    def problems(self) -> tuple[str, ...]:
        """After `stop`: why the fault did not take effect, or not wholly, in words; empty where there is nothing to say."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Injector:
    """A mechanism: its name in the grammar, the layer it touches, what it does not certify, its actions.

    `actions` maps an action's name to its frozen keyword dataclass; the class's docstring is its help. `targets` are the
    keys of `Target` that the mechanism honours: any other is refused, never ignored. `make(fault, site)` gives the injection.
    """

    name: str
    layer: str
    title: str
    certifies_not: str
    needs: tuple[str, ...] = ()
    actions: Mapping[str, type]
    targets: tuple[str, ...]
    make: Callable[[Fault, Site], Injection]
    exclusive: bool = False
    """Whether two different actions at one place and time contradict each other."""
    folder: Path = Path()
    check: Callable[[Fault], None] = lambda fault: None
    """Raises ValueError for a fault whose action, parameters and targets do not go together; called when it is parsed."""
    probe: Callable[[], Unavailable | None] = field(default=lambda: None)

    def __post_init__(self) -> None:
        if self.layer not in LAYERS:
            raise UsageError(f"injector {self.name}: layer {self.layer!r} is not one of {', '.join(LAYERS)}")
        odd = sorted(set(self.targets) - set(TARGETS))
        if odd:
            raise UsageError(f"injector {self.name}: unknown targets {odd}", f"known are {', '.join(TARGETS)}")


def firing_json(one: Firing) -> dict[str, Any]:
    """A firing as run.json keeps it; missing is null."""
    return {
        "t_ns": one.t_ns,
        "rank": one.rank,
        "call": one.call,
        "nth": one.nth,
        "ended_ns": one.ended_ns,
        "detail": one.detail or None,
    }
