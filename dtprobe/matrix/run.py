"""The cells of a matrix, one after another: a venv, and in it the ordinary night as a process of its own, with the same --out and history.

`<out>/suites/<utc>-<pid>-matrix/matrix.json` (schema dtprobe.matrix/1) is whole at every instant: each cell with its state, and of one
that ran the id of its night beside. A matrix that was interrupted or killed is gone on with from it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from dtprobe import machine
from dtprobe.catalog import PACKAGE
from dtprobe.clock import Clock, SystemClock
from dtprobe.engines.node import end
from dtprobe.errors import DtprobeError, Unavailable, UsageError
from dtprobe.interrupts import interruptible
from dtprobe.matrix import venvs
from dtprobe.matrix.cells import NONE, Cell, Spec
from dtprobe.matrix.compare import Change, changes, observed
from dtprobe.store import Store
from dtprobe.store.files import read_json, write_json
from dtprobe.suite import FOLDER, load
from dtprobe.suite.progress import held

SCHEMA = "dtprobe.matrix/1"
FILE = "matrix.json"
SUFFIX = "-matrix"
STATES = ("pending", "building", "running", "done", "unsupported", "failed", "interrupted")
CODE = "code"
"""Of the matrix's folder: a copy of an installed dtprobe, which cells of other Pythons run. A checkout is run where it lies."""
INTERRUPTED = 130
LINES_S = 5.0


@dataclass(frozen=True, kw_only=True)
class CellState:
    """What has become of a cell. `python` and `torch` are what really ran there, `night` is its night's id below suites/."""

    cell: Cell
    state: str = "pending"
    reason: str = ""
    remedy: str = ""
    python: str = ""
    torch: str = ""
    installer: str = ""
    built_s: float | None = None
    """How long its venv took to build; None where it was there already."""
    night: str = ""
    pid: int | None = None
    began_ns: int | None = None
    took_s: float = 0.0
    well: bool | None = None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "id": self.cell.id}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> CellState:
        return cls(**{**{key: value for key, value in data.items() if key != "id"}, "cell": Cell(**data["cell"])})


class Matrix:
    """One matrix under way, and its file. `words` are the options of `dtprobe nightly` that all cells share."""

    def __init__(
        self,
        folder: Path,
        spec: Spec,
        words: Sequence[str],
        *,
        jobs: int,
        began_ns: int,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        clock: Clock,
        states: Sequence[CellState] = (),
    ) -> None:
        self.folder = folder
        self.out = folder.parent.parent
        self.spec = spec
        self.words = tuple(words)
        self.interrupted = False
        self.extra: dict[str, Any] = {}
        """Further entries of the file: what a bisection found."""
        self._jobs = jobs
        self._began_ns = began_ns
        self._environ = environ
        self._say = say
        self._clock = clock
        self._ended = False
        self._machine = machine.machine_facts(environ=environ).as_json()
        self._states = {one.cell.id: one for one in states} or {cell.id: CellState(cell=cell) for cell in spec.cells}
        self._changes: tuple[Change, ...] = ()
        self._write()

    @property
    def states(self) -> tuple[CellState, ...]:
        return tuple(self._states.values())

    @property
    def well(self) -> bool:
        """At least one cell ran, and the night of each that ran was well. A cell that cannot be had here is neither."""
        ran = [one for one in self.states if one.state != "unsupported"]
        return bool(ran) and all(one.state == "done" and one.well for one in ran) and not self.interrupted

    def run(self) -> None:
        """All cells that have not been run. An interrupt ends the one that runs, and is a result as well."""
        # What could not be had is tried again: its remedy may have been taken.
        todo = [one for one in self.states if one.state != "done"]
        try:
            with interruptible():
                for number, state in enumerate(todo, len(self.states) - len(todo) + 1):
                    self._say(f"cell {number} of {len(self.states)}: {state.cell.id}")
                    self.run_cell(state.cell)
        except KeyboardInterrupt:
            self.interrupted = True
        self.end()

    def run_cell(self, cell: Cell) -> CellState:
        """Build what it needs and run its night; cells need not have been in the spec. An interrupt passes through, the cell being `interrupted`."""
        state = self._states.get(cell.id) or CellState(cell=cell)
        if state.state == "done":
            return state
        began = self._clock.monotonic()
        state = self._now(replace(state, state="building", reason="", remedy=""))
        try:
            venv = venvs.get(cell.python, cell.torch, self.spec.install, environ=self._environ, say=self._say)
            if isinstance(venv, Unavailable):
                self._say(f"{cell.id}: unsupported: {venv}")
                return self._now(replace(state, state="unsupported", reason=venv.reason, remedy=venv.remedy))
            state = replace(
                state,
                python=venv.python,
                torch=venv.torch,
                installer=venv.installer,
                built_s=venv.took_s if venv.new else state.built_s,
            )
            ran = self._night(venv, state)
        except KeyboardInterrupt:
            self._now(replace(self._states[cell.id], state="interrupted"))
            raise
        except DtprobeError as error:
            self._say(f"{cell.id}: failed: {error}")
            return self._now(
                replace(self._states[cell.id], state="failed", reason=error.message, remedy=error.remedy, well=False)
            )
        if ran.state == "interrupted":
            raise KeyboardInterrupt
        return self._now(replace(ran, took_s=round(state.took_s + self._clock.monotonic() - began, 1)))

    def end(self) -> None:
        """Compare what ran and write it down for good."""
        nights = [one.night for one in self.states if one.night]
        self._changes = changes(observed(self.out, nights)) if nights else ()
        self._ended = not self.interrupted
        self._write()

    def as_json(self) -> dict[str, Any]:
        me = psutil.Process()
        return {
            "schema": SCHEMA,
            "matrix": self.folder.name,
            "began_ns": self._began_ns,
            "ended": self._ended,
            "interrupted": self.interrupted,
            "well": self._ended and self.well,
            "pid": me.pid,
            "pid_began": me.create_time(),
            "spec": self.spec.as_json(),
            "words": list(self.words),
            "jobs": self._jobs,
            "machine": self._machine,
            "cells": [one.as_json() for one in self.states],
            "scenarios": self._scenarios(),
            "changes": [one.as_json() for one in self._changes],
            **self.extra,
        }

    def _scenarios(self) -> list[dict[str, Any]]:
        """A row a scenario: what each cell that ran said of it."""
        rows: dict[str, dict[str, Any]] = {}
        kept = ("status", "verdict", "expected", "mitigation", "because", "folder", "took_s")
        for state in self.states:
            file = self.out / FOLDER / state.night / "summary.json"
            if state.state != "done" or not file.is_file():
                continue
            for one in load(file)["scenarios"]:
                row = rows.setdefault(one["scenario"], {"scenario": one["scenario"], "title": one["title"], "cells": {}})
                row["cells"][state.cell.id] = {**{name: one[name] for name in kept}, "runs": max(1, len(one["runs"]))}
        return sorted(rows.values(), key=lambda row: str(row["scenario"]))

    def _night(self, venv: venvs.Venv, state: CellState) -> CellState:
        """Start the cell's night, or go on with the one that it had begun; follow it to its end."""
        cell, began_ns = state.cell, self._clock.now_ns()
        night = state.night or _night_of(self.out, state)
        words = ["--resume", night] if night else [*self.words, *cell.words]
        argv = [str(venv.interpreter), "-m", "dtprobe.engines.held", str(os.getpid()), "nightly", *words]
        argv += ["--out", str(self.out), "--jobs", str(self._jobs)]
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self._environment(venv),
            start_new_session=True,
            text=True,
            errors="replace",
        )
        state = self._now(replace(state, state="running", pid=process.pid, night=night, began_ns=began_ns))
        last: deque[str] = deque(maxlen=1)
        reader = threading.Thread(target=self._follow, args=(process, cell.id, last), daemon=True)
        reader.start()
        try:
            process.wait()
        finally:
            end(process)  # type: ignore[arg-type]  # of text instead of bytes: nothing is read there
            reader.join(LINES_S)
            state = self._now(replace(state, night=night or _night_of(self.out, state)))
        if process.returncode == INTERRUPTED:
            return replace(state, state="interrupted")
        if process.returncode not in (0, 1) or not state.night:
            why = last[0].removeprefix("dtprobe: ") if last else f"its night ended with exit code {process.returncode}"
            return replace(state, state="failed", reason=why, remedy="see the lines above", well=False)
        return replace(state, state="done", well=process.returncode == 0)

    def _follow(self, process: subprocess.Popen[str], name: str, last: deque[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if line.strip():
                last.append(line.strip())
                self._say(f"  {name}: {line.rstrip()}")

    def _environment(self, venv: venvs.Venv) -> dict[str, str]:
        """Ours, with the venv's programs first and dtprobe's own code on the path."""
        code = PACKAGE.parent if (PACKAGE.parent / "scenarios").is_dir() else self._copied()
        path = ":".join([str(venv.interpreter.parent), self._environ.get("PATH", os.defpath)])
        kept = {key: value for key, value in self._environ.items() if key not in ("PYTHONHOME", "PYTHONPATH")}
        return {**kept, "PATH": path, "VIRTUAL_ENV": str(venv.folder), "PYTHONPATH": str(code)}

    def _copied(self) -> Path:
        code = self.folder / CODE
        if not (code / PACKAGE.name).is_dir():
            part = self.folder / f".{CODE}"
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(PACKAGE, part / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
            part.rename(code)
        return code

    def _now(self, state: CellState) -> CellState:
        self._states[state.cell.id] = state
        self._write()
        return state

    def _write(self) -> None:
        write_json(self.folder / FILE, self.as_json())


def default_spec() -> dict[str, str]:
    """What a matrix varies nothing of: the Python and torch that run now, and builds that fit this machine."""
    try:
        torch = metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        torch = NONE
    gpus = machine.machine_facts(environ=os.environ).gpus
    return {"python": ".".join(platform.python_version_tuple()[:2]), "torch": torch, "build": "any" if gpus else "cpu"}


@contextmanager
def begun(
    spec: Spec,
    words: Sequence[str],
    *,
    out: Path,
    jobs: int,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    clock: Clock | None = None,
) -> Iterator[Matrix]:
    """A new matrix in a folder of its own, held by this process. Raises UsageError where `out` cannot be written."""
    clock = clock or SystemClock()
    Store.open(out)
    began_ns = clock.now_ns()
    stamp = datetime.fromtimestamp(began_ns / 1e9, UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = out.resolve() / FOLDER / f"{stamp}-{os.getpid()}{SUFFIX}"
    folder.mkdir(parents=True)
    with held(folder):
        yield Matrix(folder, spec, words, jobs=jobs, began_ns=began_ns, environ=environ, say=say, clock=clock)


@contextmanager
def resumed(
    folder: Path, *, jobs: int, environ: Mapping[str, str], say: Callable[[str], None], clock: Clock | None = None
) -> Iterator[Matrix]:
    """A matrix that was ended by whatever end, as it was asked for. Raises UsageError where another process runs it."""
    data = read(folder)
    with held(folder):
        yield Matrix(
            folder.resolve(),
            Spec.of(data["spec"]),
            data["words"],
            jobs=jobs,
            began_ns=int(data["began_ns"]),
            environ=environ,
            say=say,
            clock=clock or SystemClock(),
            states=[CellState.of(one) for one in data["cells"]],
        )


def read(folder: Path) -> dict[str, Any]:
    """A matrix.json; raises UsageError where there is none, DtprobeError where it is damaged."""
    if not (folder / FILE).is_file():
        raise UsageError(f"{folder} holds no matrix: it has no {FILE}", f"name a folder below suites/ that ends in {SUFFIX}")
    data = read_json(folder / FILE)
    if data.get("schema") != SCHEMA:
        raise DtprobeError(f"{folder / FILE}: schema {data.get('schema')!r}, this version reads {SCHEMA!r}")
    return data


def resumable(out: Path, said: str) -> Path | None:
    """The matrix that `--resume SAID` means: a folder, an id, or for `latest` the newest one, unless a night of no matrix is newer."""
    for folder in (Path(said), out / FOLDER / said):
        if (folder / FILE).is_file():
            return folder
    if said != "latest":
        return None
    matrices = sorted((out / FOLDER).glob(f"*{SUFFIX}/{FILE}"))
    if not matrices:
        return None
    own = {one["night"] for one in read(matrices[-1].parent)["cells"]} | {matrices[-1].parent.name}
    newest = max((out / FOLDER).glob("*/*.json"), key=lambda path: path.parent.name).parent.name
    return matrices[-1].parent if newest in own or newest < matrices[-1].parent.name else None


def _night_of(out: Path, state: CellState) -> str:
    """The night that the cell's process began, by its id: it ends with the pid. Empty where there is none yet."""
    if state.pid is None or state.began_ns is None:
        return ""
    began = datetime.fromtimestamp(state.began_ns / 1e9, UTC).strftime("%Y%m%dT%H%M%SZ")
    found = [path.parent.name for path in (out / FOLDER).glob(f"*-{state.pid}/progress.json")]
    return max((name for name in found if name >= began), default="")
