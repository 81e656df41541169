"""What runs left behind whose harness and warden both died: found by journal and marker, verified, and cleaned.

Only what is certainly a dead run's is touched: journals of this user, written on this host and in this pid namespace, whose
harness and warden (pid with start time) are gone; and processes that carry the marker of such a run in the environment
they were started with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dtprobe import ledger, processes, undo
from dtprobe.ledger import Ledger, LedgerError, Owner
from dtprobe.processes import HARNESS, RUN_ID, WARDEN, Identity, Process

KILL_WITHIN_S = 2.0
UNREADABLE_AFTER_S = 60.0
"""Age from which a journal without a readable header counts as cut short by a crash, not as being written."""


@dataclass(frozen=True)
class Leftover:
    """One thing of a dead run. `cleaned` after it was ended or removed; `problem` says why it could not be."""

    run_id: str
    kind: str
    what: str
    cleaned: bool = False
    problem: str = ""

    def as_json(self) -> dict[str, str | bool]:
        return asdict(self)

    def __str__(self) -> str:
        state = "cleaned" if self.cleaned else self.problem or "left behind"
        return f"run {self.run_id}: {self.what}: {state}"


def find(environ: Mapping[str, str] = os.environ) -> list[Leftover]:
    """All that dead runs of this user left on this machine; touches nothing."""
    found = [Leftover(environ[RUN_ID], "process", processes.describe(one)) for one, environ in _processes()]
    for path in _journals(environ):
        try:
            owner, journal = ledger.reopen(path)
        except LedgerError as error:
            if time.time() - path.stat().st_mtime > UNREADABLE_AFTER_S:
                found.append(Leftover(path.stem, "journal", str(path), problem=str(error)))
            continue
        if _dead(owner):
            if not owner.same_boot():
                journal.forget_kernel_state()
            things = [(entry.kind, undo.remaining(entry.kind, entry.data)) for entry in journal.pending.values()]
            found += [Leftover(owner.run_id, kind, what) for kind, what in things if what]
            found.append(Leftover(owner.run_id, "journal", f"journal {path}"))
        journal.release()
    return found


def clean(environ: Mapping[str, str] = os.environ) -> list[Leftover]:
    """End and remove all that `find` finds; what it found, each with whether it is gone."""
    before = find(environ)
    problems: dict[str, list[str]] = {}
    for path in _journals(environ):
        try:
            owner, journal = ledger.reopen(path)
        except LedgerError:
            if any(one.run_id == path.stem and one.kind == "journal" for one in before):
                path.unlink(missing_ok=True)
            continue
        if _dead(owner):
            problems[owner.run_id] = _undo(owner, journal)
        else:
            journal.release()
    processes.end(lambda: [one for one, _ in _processes()], within_s=KILL_WITHIN_S)
    still = {(one.run_id, one.what) for one in find(environ)}
    return [
        replace(one, problem="; ".join(problems.get(one.run_id, ())) or "it could not be ended")
        if (one.run_id, one.what) in still
        else replace(one, cleaned=True, problem="")
        for one in before
    ]


def take_over(path: Path, warden_pid: int) -> list[str]:
    """For a harness whose warden was killed: do the warden's work of this run; what could not be undone, in words."""
    if not path.exists():
        return []
    try:
        owner, journal = ledger.reopen(path)
    except LedgerError as error:
        return [str(error)]
    if owner.warden.pid != warden_pid or owner.harness.pid != os.getpid():  # another run of the same name
        journal.release()
        return []
    return _undo(owner, journal)


def _undo(owner: Owner, journal: Ledger) -> list[str]:
    spared = processes.ancestors(os.getpid())

    def members() -> list[Process]:
        return [one for one, _ in processes.marked(owner.run_id) if one.pid not in spared]

    left = []
    if owner.same_boot():
        left = processes.end(members, within_s=KILL_WITHIN_S)
    else:
        journal.forget_kernel_state()
    problems = [f"{processes.describe(one)} could not be ended" for one in left] + journal.revert_all()
    journal.close()
    return problems


def _journals(environ: Mapping[str, str]) -> list[Path]:
    folder = ledger.folder(environ)
    return sorted(path for path in folder.glob("*.jsonl") if path.stat().st_uid == os.geteuid())


def _dead(owner: Owner) -> bool:
    return owner.here() and not owner.live()


def _processes() -> list[tuple[Process, Mapping[str, str]]]:
    """Processes that carry the marker of a run whose harness and warden are gone, wherever its journal lies."""
    spared = processes.ancestors(os.getpid())
    return [(one, environ) for one, environ in processes.marked() if one.pid not in spared and _abandoned(one, environ)]


def _abandoned(one: Process, environ: Mapping[str, str]) -> bool:
    try:
        pid, start, namespace = map(int, environ.get(HARNESS, "").split("."))
        warden = Identity(*map(int, environ[WARDEN].split("."))) if WARDEN in environ else Identity(one.pid, one.start)
    except (ValueError, TypeError):
        return False  # not a marker of ours, or not one that we understand
    if namespace != processes.pid_namespace() or Identity(pid, start).alive():
        return False
    return not warden.at_work()
