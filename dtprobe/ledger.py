"""The journal of a run: who owns it, and what must be undone, on disk before it is done.

One file a run, JSON lines: a header, then `{"n", "kind", "data"}` for each entry and `{"done": n}` for each that was
undone. A line that a crash cut short is the last one, and its thing was never made: it is ignored.
Standard library only: the warden runs without site-packages.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dtprobe import processes, undo
from dtprobe.processes import Identity

SCHEMA = "dtprobe.ledger/1"
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class LedgerError(Exception):
    """The journal cannot be written or read; the message says why."""


class Owner(NamedTuple):
    """Whose run it is. Pids count only on the same host, in the same boot and the same pid namespace."""

    run_id: str
    host: str
    boot: str
    namespace: int
    harness: Identity
    warden: Identity

    def here(self) -> bool:
        """Whether the run was on this machine (perhaps before it started anew), in this pid namespace."""
        return self.host == os.uname().nodename and (self.boot != boot_id() or self.namespace == processes.pid_namespace())

    def same_boot(self) -> bool:
        return self.boot == boot_id()

    def live(self) -> bool:
        """Whether harness or warden still cares for the run; only meaningful where `here`. A stopped warden does not."""
        return self.same_boot() and (self.harness.alive() or self.warden.at_work())


class Entry(NamedTuple):
    """One thing to be undone."""

    number: int
    kind: str
    data: Mapping[str, Any]


class Ledger:
    """A run's journal, open for writing. Entries are undone last first."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.pending: dict[int, Entry] = {}
        self._descriptor = descriptor
        self._next = 1

    @classmethod
    def create(cls, folder: Path, owner: Owner) -> Ledger:
        """Start the journal of a run. Raises LedgerError: the folder cannot be written, or the run has one already."""
        if not RUN_NAME.fullmatch(owner.run_id):
            raise LedgerError(f"run id {owner.run_id!r} is not made of letters, digits, dot, dash and underscore")
        path = folder / f"{owner.run_id}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise LedgerError(f"run {owner.run_id} is open already: {path} exists") from error
        except OSError as error:
            raise LedgerError(f"cannot write the journal {path}: {error.strerror}") from error
        made = cls(path, descriptor)
        made._write({"schema": SCHEMA, **owner._asdict()})
        return made

    def announce(self, kind: str, data: Mapping[str, Any]) -> int:
        """Note what is about to be made; the entry's number. Raises LedgerError where it may not be."""
        if refusal := undo.conflict(kind, data):
            raise LedgerError(refusal)
        entry = Entry(self._next, kind, dict(data))
        self._write({"n": entry.number, "kind": kind, "data": entry.data})
        self.pending[entry.number] = entry
        self._next += 1
        return entry.number

    def revert(self, number: int) -> None:
        """Undo one entry now; nothing where it has been. Raises undo.UndoError, and the entry stays."""
        if (entry := self.pending.get(number)) is None:
            return
        undo.undo(entry.kind, entry.data)
        self._write({"done": number})
        del self.pending[number]

    def revert_all(self) -> list[str]:
        """Undo every entry, last first; what could not be undone, in words, stays in the journal."""
        problems = []
        for number in sorted(self.pending, reverse=True):
            try:
                self.revert(number)
            except undo.UndoError as error:
                problems.append(str(error))
        return problems

    def forget_kernel_state(self) -> None:
        """Drop what the restart of the machine has undone: its pids and names may by now be somebody else's."""
        self.pending = {number: entry for number, entry in self.pending.items() if entry.kind in undo.LASTING}

    def release(self) -> None:
        """Close the file and leave it as it is."""
        os.close(self._descriptor)

    def close(self) -> None:
        """Done with the run: the journal goes when nothing is pending, and stays for the doctor when something is."""
        self.release()
        if not self.pending:
            self.path.unlink(missing_ok=True)

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            os.write(self._descriptor, (json.dumps(line) + "\n").encode())
            os.fsync(self._descriptor)
        except OSError as error:
            raise LedgerError(f"cannot write the journal {self.path}: {error.strerror}") from error


def reopen(path: Path) -> tuple[Owner, Ledger]:
    """The journal of a run whose warden died, to undo what is pending. Raises LedgerError for what is not a journal."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError as error:
        raise LedgerError(f"cannot read the journal {path}: {error.strerror}") from error
    ledger = Ledger(path, descriptor)
    try:
        head = json.loads(lines[0])
        if head.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        owner = Owner(**{**head, "harness": Identity(*head["harness"]), "warden": Identity(*head["warden"])})
        # After the last newline stands nothing, or what a crash cut short.
        for line in map(json.loads, lines[1:-1]):
            if "done" in line:
                ledger.pending.pop(line["done"], None)
            else:
                ledger.pending[line["n"]] = Entry(line["n"], line["kind"], line["data"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        os.close(descriptor)
        raise LedgerError(f"{path} is not a journal of a run: {error}") from error
    ledger._next = max(ledger.pending, default=0) + 1
    return owner, ledger


def folder(environ: Mapping[str, str]) -> Path:
    """Where journals lie: `$XDG_STATE_HOME/dtprobe/ledger`, else below `~/.local/state` (XDG base directories)."""
    state = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".local" / "state")
    return Path(state) / "dtprobe" / "ledger"


def boot_id() -> str:
    """The kernel's name for this boot: processes, mounts and namespaces of another are gone."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
