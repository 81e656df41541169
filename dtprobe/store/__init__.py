"""What outlives a run: its folder, and its rows in the history.

`Store.open(out)` checks the place, `store.create(...)` makes a run's folder, `run.write_verdict(...)` and the reports follow,
`store.finish(run, ...)` enters it in the history and marks it finished. `Store(out).find("latest")` and `.runs()` only read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.store.archive import BrokenFile, History, Reading, rows_of
from dtprobe.store.files import MIN_FREE_BYTES, require_folder, require_space, write_text
from dtprobe.store.runs import RESERVED, RUN_ID, RunFolder, folder_name

__all__ = ["MIN_FREE_BYTES", "BrokenFile", "History", "Listed", "Reading", "RunFolder", "Store", "history"]


ELSEWHERE = "history.url"
"""The file in a folder of runs that says at which URL their history is."""


@dataclass(frozen=True)
class Listed:
    """A run folder in a listing: the run, or why its `run.json` could not be read."""

    path: Path
    run: RunFolder | None
    problem: str = ""


class Store:
    """The folder that holds run folders (`<scenario>[.<variant>]/<id>/`) and their history, or the URL where that is."""

    def __init__(self, out: Path) -> None:
        self.out = out

    @cached_property
    def history(self) -> History:
        return History(_place_of(self.out))

    @classmethod
    def open(cls, out: Path, *, history: str | None = None, need_bytes: int = MIN_FREE_BYTES) -> Store:
        """A store that runs can be made in: raises UsageError where `out` cannot be written, DtprobeError where the disk is full.

        `history` puts the history of `out` at that URL, from now on and for all who open `out`; what it has held so far is taken along.
        """
        require_folder(out)
        require_space(out, need_bytes)
        if history is not None:
            _move_history(out, history)
        return cls(out)

    def create(
        self, scenario: str, variant: str, facts: Mapping[str, Any], *, started_ns: int, token: str | None = None
    ) -> RunFolder:
        """A new run folder, `unfinished` until `finish` or `interrupt`. `facts` are the further entries of `run.json`."""
        folder = self.out / folder_name(scenario, variant)
        return RunFolder.create(folder, {"scenario": scenario, "variant": variant, **facts}, started_ns=started_ns, token=token)

    def finish(self, run: RunFolder, *, now_ns: Callable[[], int]) -> None:
        """Enters the run with its `verdict.json` in the history, then marks it finished. Raises DtprobeError without a verdict.

        In this order a kill in between leaves a run that says unfinished, never a finished one that the history lacks.
        """
        verdict = run.verdict()
        if verdict is None:
            raise DtprobeError(f"{run.path}: no verdict.json, so the run cannot be finished")
        ended_ns = now_ns()
        self.history.append(rows_of(run.facts, verdict, (ended_ns - run.facts["started_ns"]) / 1e9))
        run.end("finished", ended_ns)
        self.history.fold_if_due(now_ns)

    def interrupt(self, run: RunFolder, *, now_ns: Callable[[], int]) -> None:
        """Marks the run interrupted: by its user, not by a crash."""
        run.end("interrupted", now_ns())

    def paths(self) -> list[Path]:
        """All run folders, newest start first."""
        return sorted(self._walk(), key=lambda path: path.name, reverse=True)

    def runs(self, limit: int | None = None) -> list[Listed]:
        """The newest `limit` runs, newest first, whatever their state."""
        return [_listed(path) for path in self.paths()[:limit]]

    def find(self, reference: str) -> RunFolder:
        """The run that `reference` means: `latest`, a folder, a scenario (its latest run), or the beginning of an id or of its hex part.

        Raises UsageError naming the candidates where none or several match, DtprobeError where the run found is damaged.
        """
        folder = Path(reference)
        if (folder / "run.json").is_file():
            return RunFolder.open(folder)
        paths = self.paths()
        if not paths:
            raise UsageError(f"{self.out} holds no runs", "run a scenario first, or name another folder with --out")
        if reference == "latest":
            return RunFolder.open(_newest(paths))
        of_scenario = [path for path in paths if _plain(path.parent.name) == _plain(reference)]
        if of_scenario:
            return RunFolder.open(_newest(of_scenario))
        matches = [
            path for path in paths if path.name.startswith(reference) or path.name.partition("-")[2].startswith(reference)
        ]
        if len(matches) == 1:
            return RunFolder.open(matches[0])
        if matches and reference:
            shown = ", ".join(path.name for path in matches[:4]) + (", ..." if len(matches) > 4 else "")
            raise UsageError(f"{reference!r} begins {len(matches)} runs: {shown}", "give more of the id")
        known = [*(path.name for path in paths), *{path.parent.name.replace(".", ":") for path in paths}]
        close = get_close_matches(reference, known, n=3, cutoff=0.5) or [paths[0].name]
        raise UsageError(f"no run {reference!r} in {self.out}", f"perhaps {', '.join(close)}, or latest")

    def _walk(self) -> Iterator[Path]:
        try:
            scenarios = [entry for entry in os.scandir(self.out) if entry.is_dir() and entry.name not in RESERVED]
        except OSError:
            return
        for scenario in scenarios:
            with os.scandir(scenario.path) as entries:
                yield from (Path(entry.path) for entry in entries if RUN_ID.fullmatch(entry.name))


def history(out: Path | str) -> Reading:
    """The history of the runs in `out`, or at a URL: `history(out).overview()`, `.sql("SELECT ... FROM history")`, `.broken`."""
    return History(str(out) if "://" in str(out) else _place_of(Path(out))).read()


def _place_of(out: Path) -> Path | str:
    try:
        url = (out / ELSEWHERE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return out / "history"
    except OSError as error:
        raise DtprobeError(f"{out / ELSEWHERE}: cannot be read: {error.strerror}", "it says where the history is") from error
    if "://" not in url:
        raise UsageError(
            f"{out / ELSEWHERE}: {url!r} is no URL", "write one line into it, or remove it: history/ then holds the history"
        )
    return url


def _move_history(out: Path, url: str) -> None:
    """First the rows, then the word: a kill in between leaves the history where it was."""
    if "://" not in url:
        raise UsageError(f"history {url!r} is no URL", "s3://bucket/folder, say; a folder is file:///its/path")
    old = _place_of(out)
    if str(old) == url:
        return
    reading = History(old).read()
    try:
        History(url).add(reading.table())
    finally:
        reading.close()
    write_text(out / ELSEWHERE, url + "\n")


def _listed(path: Path) -> Listed:
    try:
        return Listed(path, RunFolder.open(path))
    except DtprobeError as error:
        return Listed(path, None, str(error))


def _newest(paths: list[Path]) -> Path:
    """Of paths sorted newest first. Ids of one second sort by chance, so there `started_ns` tells which came last."""
    second = paths[0].name.partition("-")[0]
    tied = [path for path in paths if path.name.startswith(second)]
    return paths[0] if len(tied) == 1 else max(tied, key=_started_ns)


def _started_ns(path: Path) -> int:
    run = _listed(path).run
    return int(run.facts.get("started_ns") or 0) if run else 0


def _plain(name: str) -> str:
    """A scenario's name as one types it, and its folder's: hyphens and underscores are the same."""
    return name.replace(":", ".").replace("_", "-").lower()
