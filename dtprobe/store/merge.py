"""Runs of other machines in this history: each once, under the host that made it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.store.archive import History, rows_of
from dtprobe.store.runs import RUN_ID, RunFolder


@dataclass(frozen=True, kw_only=True)
class Came:
    """How many runs were new and how many the history had; what could not be read, one line each."""

    new: int
    known: int
    problems: tuple[str, ...]


def merge(sources: Sequence[Path], out: Path) -> Came:
    """Enter what `sources` hold into `<out>/history`: histories, run folders, or folders with either below. Run folders are not copied.

    Raises UsageError for a path that does not exist or holds no run, DtprobeError where the history cannot be written.
    """
    ours = History(out / "history")
    reading = ours.read()
    known = set(reading.sql("SELECT DISTINCT run FROM history")["run"])
    reading.close()
    new, had, problems = 0, set[str](), list[str]()
    for source in sources:
        if not source.exists():
            raise UsageError(f"{source}: no such folder", "name a folder of runs, a run folder or a history folder")
        seen = 0
        for run, rows in _found(source, problems):
            seen += 1
            if run in known:
                had.add(run)
                continue
            ours.append(rows)
            known.add(run)
            new += 1
        if not seen and not problems:
            raise UsageError(f"{source} holds no finished run", "name a folder of runs, a run folder or a history folder")
    return Came(new=new, known=len(had), problems=tuple(problems))


def _found(source: Path, problems: list[str]) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    """Runs in histories first: they tell all that run folders tell, without opening each."""
    seen: set[str] = set()
    for folder in (source, source / "history"):
        if not any(folder.glob("*.parquet")):
            continue
        reading = History(folder).read()
        problems += [f"{one.path} is left out: {one.reason}" for one in reading.broken]
        frame = reading.frame()
        reading.close()
        for run, own in frame.groupby("run", sort=False):
            seen.add(str(run))
            rows = own.astype(object).where(own.notna(), None)
            yield str(run), [{str(name): value for name, value in row.items()} for row in rows.to_dict("records")]
    files = [source / "run.json"] if (source / "run.json").is_file() else sorted(source.glob("*/*/run.json"))
    for file in files:
        if file.parent.name in seen or not RUN_ID.fullmatch(file.parent.name):
            continue
        try:
            run = RunFolder.open(file.parent)
            verdict = run.verdict()
        except DtprobeError as error:
            problems.append(str(error))
            continue
        if verdict is not None and run.state == "finished":
            yield run.id, rows_of(run.facts, verdict)
