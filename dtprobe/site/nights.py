"""Nights on disk: one that ended, one in progress, one that was cut off, one that cannot be read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dtprobe.report import words

SUMMARY, PROGRESS = "summary.json", "progress.json"
MATRIX = "matrix.json"
"""In the folder of a matrix, whose cells are nights with folders of their own."""
ORDER = (
    "not-as-expected", "broken", "failed", "flaky", "not-run", "left-out", "as-expected", "unsupported",
)  # fmt: skip
"""Statuses of a night's rows in the order in which a reader wants them."""
ILL = ("not-as-expected", "broken", "failed", "flaky", "not-run")


@dataclass(frozen=True, kw_only=True)
class Night:
    """A night's folder. `state` is finished, running, cut-off or unreadable; `problem` says what is wrong with it.

    `total` counts scenarios, in progress their runs.
    """

    id: str
    path: Path
    state: str
    written_ns: int = 0
    problem: str = ""
    began_ns: int | None = None
    took_s: float | None = None
    torch: str = ""
    python: str = ""
    well: bool | None = None
    interrupted: bool = False
    total: int = 0
    counts: tuple[tuple[str, int], ...] = ()
    running: tuple[str, ...] = ()

    @property
    def done(self) -> int:
        return sum(number for _, number in self.counts)

    @property
    def headline(self) -> str:
        good = dict(self.counts).get("as-expected", 0)
        ill = [f"{number} {status.replace('-', ' ')}" for status, number in self.counts if status in ILL]
        if self.state == "unreadable":
            return "This night cannot be read"
        if self.state != "finished":
            said = "in progress" if self.state == "running" else "cut off"
            return ", ".join((f"{said.capitalize()}: {self.done} of {self.total} runs ended", *ill))
        return f"{words.listed(ill)} of {self.total}" if ill else f"{good} of {self.total} scenarios as expected"

    def load(self) -> Mapping[str, Any]:
        """The whole summary or progress, `{}` where it cannot be read."""
        data, _ = _json(self.path / (SUMMARY if self.state == "finished" else PROGRESS))
        return data or {}

    def regressions(self) -> tuple[Mapping[str, Any], ...]:
        """What it found to be worse than before, as it says itself."""
        found = self.load().get("regressions")
        return tuple(one for one in found if isinstance(one, dict)) if isinstance(found, list) else ()

    def rows(self) -> list[Mapping[str, Any]]:
        """Its rows so far, worst first; what is no row is left out."""
        data = self.load()
        found = data.get("scenarios" if self.state == "finished" else "done")
        rows = [one for one in found if isinstance(one, dict) and "scenario" in one] if isinstance(found, list) else []
        return sorted(rows, key=lambda row: (_rank(str(row.get("status"))), str(row["scenario"])))


def listed(out: Path, before: Sequence[Night] = ()) -> tuple[Night, ...]:
    """All nights, newest first. Those of `before` that had ended and were not written since are taken as they were."""
    known = {night.path: night for night in before if night.state == "finished"}
    try:
        folders = sorted((path for path in (out / "suites").iterdir() if path.is_dir()), reverse=True)
    except OSError:
        return ()
    return tuple(_night(folder, known.get(folder)) for folder in folders if not (folder / MATRIX).exists())


def _rank(status: str) -> int:
    return ORDER.index(status) if status in ORDER else -1


def _night(folder: Path, before: Night | None) -> Night:
    try:
        written_ns = (folder / SUMMARY).stat().st_mtime_ns
    except OSError:
        written_ns = 0
    if before is not None and before.written_ns == written_ns:
        return before
    finished = written_ns > 0
    data, problem = _json(folder / (SUMMARY if finished else PROGRESS))
    if data is None:
        return Night(id=folder.name, path=folder, state="unreadable", problem=problem)
    try:
        return _finished(folder, data, written_ns) if finished else _progress(folder, data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Night(id=folder.name, path=folder, state="unreadable", problem=f"not in the form of a night: {error!r}")


def _finished(folder: Path, data: Mapping[str, Any], written_ns: int) -> Night:
    rows = data["scenarios"]
    return Night(
        id=folder.name,
        path=folder,
        state="finished",
        written_ns=written_ns,
        began_ns=int(data["began_ns"]),
        took_s=float(data["took_s"]),
        torch=words.clip((data.get("versions") or {}).get("torch") or "", 40),
        python=words.clip((data.get("machine") or {}).get("python") or "", 40),
        well=bool(data["well"]),
        interrupted=bool(data.get("interrupted")),
        total=len(rows),
        counts=_counts(row["status"] for row in rows),
    )


def _progress(folder: Path, data: Mapping[str, Any]) -> Night:
    alive = not data.get("ended") and _alive(data)
    return Night(
        id=folder.name,
        path=folder,
        state="running" if alive else "cut-off",
        problem="" if alive else "it was cut off before its summary; `dtprobe nightly --resume` goes on with it",
        began_ns=int(data["began_ns"]),
        total=int(data["total"]),
        counts=_counts(row["status"] for row in data["done"]),
        running=tuple(words.clip(one[0] if isinstance(one, list) else one, 120) for one in data["running"]),
    )


def _alive(data: Mapping[str, Any]) -> bool:
    """Whether the process that wrote it lives; a pid given to another process since does not count."""
    try:
        return abs(psutil.Process(int(data["pid"])).create_time() - float(data["pid_began"])) < 1.0
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _counts(statuses: Any) -> tuple[tuple[str, int], ...]:
    found = Counter(words.clip(one, 40) for one in statuses)
    return tuple(sorted(found.items(), key=lambda item: _rank(item[0])))


def _json(path: Path) -> tuple[Mapping[str, Any] | None, str]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, f"it has neither {SUMMARY} nor {PROGRESS}"
    except (OSError, ValueError) as error:
        return None, f"{path.name} cannot be read: {error}"
    return (data, "") if isinstance(data, dict) else (None, f"{path.name} is no object")
