"""Faults that a helper program outside the ranks does: a proxy, a file system, a switch. One helper may serve several faults.

The helper runs in the confinement, so it dies with the run whatever happens to the harness. It is told by lines through a
pipe with a name, and answers with lines in `<arm run>/faults/<injector>-<fault>.jsonl`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import dtprobe
from dtprobe.confine import Child
from dtprobe.errors import DtprobeError
from dtprobe.inject import Firing, Site
from dtprobe.inject.entered import EnteredInjection, Entry
from dtprobe.inject.inrank import HOOK, Plan
from dtprobe.inject.ranks import Seen, Watch
from dtprobe.inject.spec import Fault
from dtprobe.probes import RankProcess

READY_S = 90.0
"""How long a helper may take to be ready: imports of its libraries on a machine with much to do."""

STOP_S = 10.0
LOOK_S = 0.02
COUNTED = ("op", "nth", "every", "times", "probability")
ROOT = Path(dtprobe.__file__).resolve().parent.parent


class Helper:
    """A helper program under way: `python PROGRAM CONFIG`, where CONFIG is a JSON file."""

    def __init__(self, site: Site, program: Path, log: Path, folder: Path) -> None:
        self.site = site
        self.program = program
        self.log = log
        self.folder = folder
        self.child: Child | None = None
        self._pipe: int | None = None
        self._stopped = False

    @property
    def commands(self) -> Path:
        return self.folder / f"{self.log.stem}.commands"

    def start(self, config: Mapping[str, Any]) -> None:
        """Start it and wait until it is ready. Raises DtprobeError with its own words where it fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{self.log.stem}.config"
        file.write_text(json.dumps(config), encoding="utf-8")
        os.mkfifo(self.commands, 0o600)
        # Open for both: neither the warden's open waits, nor does the helper see an end before the harness's own.
        self._pipe = os.open(self.commands, os.O_RDWR | os.O_CLOEXEC)
        box = self.site.box
        path = ":".join(filter(None, [str(ROOT), box.environ.get("PYTHONPATH")]))
        self.child = box.spawn(
            [sys.executable, str(self.program), str(file)],
            env={**box.environ, "PYTHONPATH": path},
            cwd=self.folder,
            stdin=self.commands,
            stdout=self.log,
            stderr=self._complaints,
            held=False,
        )
        give_up = self.site.clock.monotonic() + READY_S
        while not any(line["kind"] == "ready" for line in said(self.log)):
            if box.wait(self.child, LOOK_S) is not None or self.site.clock.monotonic() > give_up:
                raise DtprobeError(f"the helper {self.program.parent.name}/{self.program.name} did not start: {self._why()}")

    def tell(self, **command: Any) -> None:
        """Send it a command."""
        if self._pipe is not None and self.running():
            os.write(self._pipe, (json.dumps(command) + "\n").encode())

    def running(self) -> bool:
        return self.child is not None and self.site.box.poll(self.child) is None

    def stop(self) -> str:
        """End it, kindly and then not; why it had ended before, or had to be killed, in words, else nothing."""
        if self.child is None or self._stopped:
            return ""
        self._stopped = True
        problem = "" if self.running() else f"the helper ended before the job did: {self._why()}"
        self.tell(do="stop")
        if self.site.box.wait(self.child, STOP_S) is None:
            self.site.box.signal(self.child, 9)
            self.site.box.wait(self.child, STOP_S)
            problem = f"the helper did not stop in {STOP_S:g} s and was killed"
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        return problem

    @property
    def _complaints(self) -> Path:
        return self.log.with_suffix(".err")

    def _why(self) -> str:
        text = self._complaints.read_text(encoding="utf-8", errors="replace").strip() if self._complaints.exists() else ""
        exit_ = self.site.box.poll(self.child) if self.child else None
        how = "it was not ready in time" if exit_ is None else f"exit code {exit_.code}, signal {exit_.signal}"
        return f"{how}; {text.splitlines()[-1]}" if text else how


class HelpedInjection(EnteredInjection):
    """Base: a subclass names the helper and says what it has to know (`part`), and what is put in front of a rank (`front`).

    Faults of one kind that have the same `place` share a helper; the first of them starts it, when all have said their part.
    `ledger` is what must be undone although the harness is killed, announced before the helper starts.
    """

    name: ClassVar[str]
    program: ClassVar[Path]

    def __init__(self, fault: Fault, site: Site) -> None:
        super().__init__(fault, site)
        self.shared = Plan(site, self.name, HOOK / "plugins" / "enter.py")
        self.leader = site.index
        self._helper: Helper | None = None
        self._watch = Watch(site, fault.target, self._begin)
        self._helper_problem = ""
        self._tickets: list[int] = []

    def part(self) -> Mapping[str, Any]:
        """What the helper has to know of this fault beside its targets."""
        raise NotImplementedError

    def place(self) -> str:
        """What this fault acts on: faults at one place share a helper."""
        return str(self.site.index)

    def front(self) -> Sequence[str]:
        """The command in front of a rank's own."""
        return ()

    def config(self, parts: Sequence[Mapping[str, Any]], held: Sequence[RankProcess]) -> Mapping[str, Any]:
        """The helper's configuration, for all faults at its place."""
        return {"parts": parts}

    def ledger(
        self, parts: Sequence[Mapping[str, Any]], held: Sequence[RankProcess]
    ) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Entries of the undo ledger (kind, data) for what the helper makes."""
        return ()

    @property
    def log(self) -> Path:
        return self.site.folder / "faults" / f"{self.name}-{self.leader:03}.jsonl"

    def prepare(self) -> None:
        target = self.fault.target
        part = {
            "index": self.site.index,
            "place": self.place(),
            "action": self.fault.action,
            "seed": self.site.seed,
            "rank": target.rank,
            "on": target.after_s is None,
            **{name: getattr(target, name) for name in COUNTED},
            **self.part(),
        }
        self.shared.write(part)
        self.leader = min(one["index"] for one in self._here())
        self.entry = Entry(front=tuple(self.front()), detail=f"{self.name} faults reach it")
        super().prepare()

    def start(self, held: Sequence[RankProcess]) -> None:
        helper = Helper(self.site, self.program, self.log, self.shared.folder)
        self._helper = helper
        if self.leader == self.site.index:
            parts = self._here()
            for kind, data in self.ledger(parts, held):
                self._tickets.append(self.site.box.undo(kind, **data))
            helper.start(self.config(parts, held))
        if self.fault.target.after_s is not None or self.fault.target.for_s is not None:
            self._watch.start(held)

    def stop(self) -> tuple[Firing, ...]:
        self._watch.stop()
        if self._helper is not None:
            self._helper_problem = self._helper.stop()
            for ticket in reversed(self._tickets):
                self.site.box.revert(ticket)
        self._plan.remove()
        self.shared.remove()
        return firings(self.log, self.site.index)

    def problems(self) -> tuple[str, ...]:
        refused = [
            one["detail"] for one in said(self.log) if one["kind"] == "refused" and one["index"] in (None, self.site.index)
        ]
        found = [*self._watch.problems, *([self._helper_problem] if self._helper_problem else []), *refused]
        return tuple(dict.fromkeys(found)) or (() if firings(self.log, self.site.index) else (self.silence(),))

    def silence(self) -> str:
        """Why it may be that nothing fired although nothing went wrong."""
        return "nothing that is aimed at happened"

    def tell(self, **command: Any) -> None:
        """Tell the helper at this place, whichever fault started it."""
        commands = self.shared.folder / f"{self.log.stem}.commands"
        pipe = os.open(commands, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(pipe, (json.dumps(command) + "\n").encode())
        finally:
            os.close(pipe)

    def _here(self) -> list[dict[str, Any]]:
        return [one for one in self.shared.parts() if one["place"] == self.place()]

    def _begin(self, seen: Seen) -> None:
        """A rank's time has come: on, and off again after `for_s`."""
        self.tell(do="begin", index=self.site.index, rank=seen.rank)
        if self.fault.target.for_s is not None:
            self._watch.later(self.fault.target.for_s, lambda: self.tell(do="end", index=self.site.index, rank=seen.rank))


def said(log: Path) -> list[dict[str, Any]]:
    """The lines of a helper's log; one that a kill cut short is left out."""
    found = []
    if log.exists():
        for text in log.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found.append(json.loads(text))
            except ValueError:
                continue
    return found


def firings(log: Path, index: int) -> tuple[Firing, ...]:
    """The firings of one fault in a helper's log, in order of time."""
    found: dict[str, dict[str, Any]] = {}
    more = []
    for line in said(log):
        if line["kind"] == "fired" and line["index"] == index:
            found[line["number"]] = line
        elif line["kind"] == "ended" and line["number"] in found:
            one = found[line["number"]]
            found[line["number"]] = {**one, "ended_ns": line["t_ns"], "detail": line["detail"] or one["detail"]}
        elif line["kind"] == "more" and line["index"] == index:
            more.append(Firing(t_ns=line["t_ns"], detail=f"and {line['count']} times more"))
    made = [
        Firing(
            t_ns=one["t_ns"],
            rank=one["rank"],
            call=one["call"],
            nth=one["nth"],
            ended_ns=one.get("ended_ns"),
            detail=one["detail"],
        )
        for one in found.values()
    ]
    return (*sorted(made, key=lambda one: one.t_ns), *more)
