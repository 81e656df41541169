"""Faults that are in how a rank's program is started: other variables, or a command in front of it.

Under our own launchers the rank's command is written so; in a foreign command the hook starts the rank's program once more,
or the whole command is started so where every rank is meant.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dtprobe import processes
from dtprobe.catalog import load_module
from dtprobe.inject import Firing, Injection, Site
from dtprobe.inject.inrank import HOOK, Plan, firings, refusals
from dtprobe.inject.spec import Fault
from dtprobe.probes import RankProcess

Value = str | Mapping[str, str]
"""A variable's value, or `{"of": "rank"}` and the like, which each rank fills in for itself."""

JOIN_S = 5.0
_LOOK_S = 0.005
_faults = load_module(HOOK / "_dtprobe_faults.py", "_dtprobe_hook_faults")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How a rank is to be started. `ahead` are put before what a list of paths holds; `{folder}` in `front` is the rank's."""

    set: Mapping[str, Value] = field(default_factory=dict)
    unset: Sequence[str] = ()
    ahead: Mapping[str, str] = field(default_factory=dict)
    front: Sequence[str] = ()
    detail: str = ""


class EnteredInjection(Injection):
    """Base: a subclass says how (`entry`), and how to see that it took effect (`took`)."""

    def __init__(self, fault: Fault, site: Site) -> None:
        self.fault = fault
        self.site = site
        self.entry = Entry()
        self._plan = Plan(site, "enter", HOOK / "plugins" / "enter.py")
        self._fired: list[Firing] = []
        self._problems: list[str] = []
        self._written: dict[int | None, Firing] = {}
        self._seen: dict[int | None, processes.Identity] = {}
        self._end = threading.Event()
        self._looker = threading.Thread(target=self._look, name=f"dtprobe-fault-{site.index}", daemon=True)

    def took(self, pid: int, rank: int | None) -> bool:
        """Whether the running process shows that it was started so."""
        raise NotImplementedError

    def whole(self) -> bool:
        """Whether a foreign command is started so as a whole, with every process that descends from it."""
        return self.fault.target.rank is None

    def in_ranks(self) -> bool:
        """Whether ranks of a foreign command are started so, each by its hook."""
        return True

    def prepare(self) -> None:
        if not self.in_ranks():
            return
        entry = self.entry
        self._plan.write(
            {
                "index": self.site.index,
                "rank": self.fault.target.rank,
                "set": dict(entry.set),
                "unset": list(entry.unset),
                "ahead": dict(entry.ahead),
                "front": list(entry.front),
                "detail": entry.detail,
            }
        )

    def environ(self, rank: int | None) -> Mapping[str, str]:
        meant = self._meant(rank)
        found = dict(self.entry.ahead) if meant else {}
        if meant:
            self._written.setdefault(rank, Firing(t_ns=0, rank=rank, detail=self.entry.detail))
        return found | (self._plan.environ() if rank is None and self.in_ranks() else {})

    def wrap(self, rank: int | None, argv: tuple[str, ...]) -> tuple[str, ...]:
        if not self._meant(rank):
            return argv
        folder = self.site.folder / ("launcher" if rank is None else f"rank{rank}")
        words = [word.replace("{folder}", str(folder)) for word in self.entry.front]
        values = self.values(rank)
        if values or self.entry.unset:
            words += ["env", *(f"--unset={name}" for name in self.entry.unset)]
            words += [f"{name}={value}" for name, value in values.items()]
        return (*words, *argv)

    def values(self, rank: int | None) -> dict[str, str]:
        """The variables to set for a rank; those that depend on the rank are nothing to a command as a whole."""
        return {
            name: _faults.placed(value, rank or 0, self.site.world_size or 1)
            for name, value in self.entry.set.items()
            if rank is not None or isinstance(value, str)
        }

    def start(self, held: Sequence[RankProcess]) -> None:
        if self._written:
            self._looker.start()

    def stop(self) -> tuple[Firing, ...]:
        self._end.set()
        if self._looker.ident is not None:
            self._looker.join(JOIN_S)
        self._plan.remove()
        for rank, one in self._written.items():
            who = self._seen.get(rank)
            name = "the command" if rank is None else f"rank {rank}"
            if who is not None and not who.alive():
                detail = f"{one.detail}; {name} ended before it could be looked at"
                self._fired.append(replace(one, t_ns=self.site.clock.now_ns(), detail=detail))
            else:
                self._problems.append(f"{name} does not show it: {one.detail}")
        return tuple(sorted([*self._fired, *firings(self.site)], key=lambda one: one.t_ns))

    def problems(self) -> tuple[str, ...]:
        """Why the fault was not applied, as far as it is known."""
        found = (*self._problems, *refusals(self.site))
        if not found and not self._fired and not firings(self.site):
            found = ("no rank that is meant ran Python with the hook (PYTHONPATH is ignored by python -I, -E and -S)",)
        return found

    def _meant(self, rank: int | None) -> bool:
        return self.whole() if rank is None else self.fault.target.hits(rank)

    def _look(self) -> None:
        """See that what was written took effect, rank by rank."""
        while self._written and not self._end.wait(_LOOK_S):
            for one in self.site.processes():
                if one.rank not in self._written or (who := processes.identity(one.pid)) is None:
                    continue
                self._seen[one.rank] = who
                if self.took(one.pid, one.rank):
                    self._fired.append(replace(self._written.pop(one.rank), t_ns=self.site.clock.now_ns()))
