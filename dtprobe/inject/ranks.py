"""Ranks of a running job as injectors from outside find them, and a thread that acts on each once its time has come.

Under our own launchers every rank is known and held before its program starts. The ranks of somebody's command come later:
those with Python write `process.json` through the hook, the others are found by the rank in their environment.
"""

from __future__ import annotations

import heapq
import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtprobe import processes
from dtprobe.inject import Site, Target
from dtprobe.probes import RankProcess
from dtprobe.processes import Identity

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Variables by which a launcher tells a process its rank, as `dtprobe.hook` reads them."""

SCAN_S = 0.5
"""So often all processes of the run are looked through for ranks without Python: it costs 20 ms on a busy machine."""

LOOK_S = 0.02
JOIN_S = 5.0


@dataclass(frozen=True)
class Seen:
    """A rank whose program runs (rank None: the command itself). `age_s` counts from the start of its program."""

    rank: int | None
    who: Identity
    age_s: float
    folder: Path


class Ranks:
    """The ranks of one arm run whose programs run. Used by one thread at a time."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._held: dict[int, bytes] = {}
        self._begun: dict[int, float] = {}
        self._scanned: dict[int, RankProcess] = {}
        self._next_scan = 0.0

    def hold(self, held: Sequence[RankProcess]) -> None:
        """Processes that wait for their release: each counts as running once it has become another program."""
        self._held = {one.pid: _command_line(one.pid) for one in held}

    def look(self) -> list[Seen]:
        """Who runs now."""
        known = list(self.site.processes())
        announced = {one.rank for one in known}
        if None in announced:
            known += [one for rank, one in self._scan().items() if rank not in announced]
        found = []
        for one in known:
            who = processes.identity(one.pid)
            if who is not None and (begun := self._begin(one)) is not None:
                found.append(Seen(one.rank, who, self.site.clock.monotonic() - begun, one.folder))
        return found

    def _begin(self, one: RankProcess) -> float | None:
        """When its program began, on the monotonic clock; None while it is held."""
        if one.pid not in self._begun:
            now = self.site.clock.monotonic()
            if one.pid in self._held:
                line = _command_line(one.pid)
                if not line or line == self._held[one.pid]:
                    return None
            else:
                now -= max(0.0, self._said_age_s(one.folder, one.pid))
            self._begun[one.pid] = now
        return self._begun[one.pid]

    def _said_age_s(self, folder: Path, pid: int) -> float:
        file = folder / "process.json"
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
            # The file's own time is the kernel's: the rank's clock may be shifted by a fault.
            written_ns = file.stat().st_mtime_ns
        except (OSError, ValueError):  # no hook: it began when it was first seen
            return 0.0
        return (self.site.clock.now_ns() - written_ns) / 1e9 if said.get("pid") == pid else 0.0

    def _scan(self) -> dict[int, RankProcess]:
        now = self.site.clock.monotonic()
        if now >= self._next_scan:
            ranks: dict[int, tuple[int, int]] = {}
            environs = {one.pid: (one, environ) for one, environ in processes.marked(self.site.box.run_id)}
            numbers = {pid: _rank_of(environ) for pid, (_, environ) in environs.items()}
            for pid, (one, _) in environs.items():
                rank = numbers[pid]
                # Children inherit the variable: the rank is the one whose parent has it not.
                if rank is not None and numbers.get(one.ppid) != rank and (rank not in ranks or one.start < ranks[rank][0]):
                    ranks[rank] = (one.start, pid)
            folder = self.site.folder
            self._scanned = {rank: RankProcess(rank, pid, folder / f"rank{rank}") for rank, (_, pid) in ranks.items()}
            self._next_scan = self.site.clock.monotonic() + SCAN_S
        return self._scanned


class Watch:
    """A thread that calls `act` once for each targeted rank, when its program has run for `after_s`.

    Without `rank`, a command in which no rank shows itself until then is acted on as a whole (rank None), unless it is
    known to be one that starts ranks. `again` keeps acting on what is started anew under the same rank; `whole` acts on a
    foreign command as a whole where no rank is named.
    """

    def __init__(
        self, site: Site, target: Target, act: Callable[[Seen], None], *, again: bool = False, whole: bool = False
    ) -> None:
        self.problems: dict[str, None] = {}
        self.waited: dict[int | None, float] = {}
        """Targets that were seen before their time had come, and for how long their programs had run when last seen."""
        self._ranks = Ranks(site)
        self._site = site
        self._target = target
        self._act = act
        self._again = again
        self._whole = whole
        self._done: set[int | tuple[int | None, Identity] | None] = set()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"dtprobe-fault-{site.index}", daemon=True)

    def start(self, held: Sequence[RankProcess]) -> None:
        self._ranks.hold(held)
        self._thread.start()

    def stop(self) -> None:
        """No act begins after this."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` after so long, on this thread, unless the watch is stopped before. Only from within an act."""
        heapq.heappush(self._later, (self._site.clock.monotonic() + seconds, next(self._order), act))

    def _run(self) -> None:
        while True:
            waiting = self._look()
            while self._later and self._later[0][0] <= self._site.clock.monotonic():
                self._do(heapq.heappop(self._later)[2])
            due_s = [waiting] + [when - self._site.clock.monotonic() for when, _, _ in self._later[:1]]
            if self._end.wait(min(max(0.001, min(due_s)), LOOK_S * 5)):
                return

    def _look(self) -> float:
        """Act on whom it is time for; in how many seconds to look again at the latest."""
        if not self._open():
            return LOOK_S * 5
        after_s = self._target.after_s or 0.0
        seen = self._ranks.look()
        ranks = [one for one in seen if one.rank is not None]
        targets = [one for one in ranks if one.rank is not None and self._target.hits(one.rank)]
        if self._target.rank is None and not ranks and self._site.world_size is None:
            targets = seen
        elif self._target.rank is None and self._whole and len(ranks) < len(seen):
            targets = [one for one in seen if one.rank is None]
        soonest = LOOK_S
        for one in targets:
            key = (one.rank, one.who) if self._again else one.rank
            if key in self._done:
                continue
            if one.age_s < after_s:
                self.waited[one.rank] = one.age_s
                soonest = min(soonest, after_s - one.age_s)
                continue
            self._done.add(key)
            self._do(self._act, one)
        return soonest

    def _open(self) -> bool:
        """Whether anybody may still have to be acted on."""
        if self._again:
            return True
        if None in self._done:
            return False
        wanted = self._target.rank or (range(self._site.world_size) if self._site.world_size else None)
        return wanted is None or not set(wanted) <= self._done

    def _do(self, act: Callable[..., None], *arguments: Seen) -> None:
        try:
            act(*arguments)
        except Exception as error:  # noqa: BLE001  the other ranks' turn still comes; the failure is said
            self.problems[f"{type(error).__name__}: {error}"] = None


def _rank_of(environ: Mapping[str, str]) -> int | None:
    return next((int(environ[name]) for name in RANK_VARIABLES if environ.get(name, "").isdigit()), None)


def _command_line(pid: int) -> bytes:
    try:
        return (processes.PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""
