"""What is known of the runs in a folder, read once: scenarios with their versions and runs, nights, regressions, and what is damaged."""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion
from packaging.version import Version as Release

from dtprobe import catalog, trends
from dtprobe.errors import DtprobeError
from dtprobe.report import words
from dtprobe.site import nights
from dtprobe.store import Reading, RunFolder, history
from dtprobe.store.files import read_json
from dtprobe.store.runs import RESERVED, RUN_ID, SCENARIO

BINS = 16
"""Bars of a cell's pass rate: the newest runs alone, or as many of them a bar as fit."""
UNKNOWN = "unknown"


@dataclass(frozen=True, order=True)
class Version:
    """A column of the matrix."""

    torch: str
    python: str

    @property
    def label(self) -> str:
        return f"torch {self.torch}, Python {self.python}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the history. `there` says whether its folder still exists; `report` whether that has a report."""

    id: str
    scenario: str
    slug: str
    started_ns: int
    version: Version
    verdict: str
    expected: str | None
    as_expected: bool | None
    mitigation: str | None
    host: str | None
    git: str | None
    took_s: float | None
    night: str | None
    there: bool


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A scenario under one version: its runs, how many of those with an expectation met it, and shares of them over time."""

    last: Run
    runs: int
    judged: int
    good: int
    rates: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured value of a metric in an arm."""

    run: str
    started_ns: int
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Trend:
    """A metric over all runs, arm by arm, oldest first."""

    metric: str
    unit: str
    arms: Mapping[str, tuple[Point, ...]]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A scenario or variant of which there is a run or a folder. `status` is that of its latest run."""

    id: str
    slug: str
    title: str
    layer: str
    tags: tuple[str, ...]
    failure_mode: str
    runs: tuple[Run, ...]
    cells: Mapping[Version, Cell]
    odd: tuple[tuple[str, str], ...]
    """Run folders that the history lacks: id, and what is the matter with them."""

    @property
    def last(self) -> Run | None:
        return self.runs[-1] if self.runs else None

    @property
    def status(self) -> str:
        """The worst of the latest runs under each version."""
        found = {status_of(cell.last) for cell in self.cells.values()}
        return next((one for one in STATUSES if one in found), "no-runs")


STATUSES = ("not-as-expected", "error", "unpinned", "as-expected", "unsupported", "no-runs")
"""What a scenario's latest runs can be, worst first."""


def status_of(run: Run) -> str:
    """`unpinned` is a verdict for which there was no expectation."""
    if run.verdict in ("error", "unsupported"):
        return run.verdict
    if run.as_expected is None:
        return "unpinned"
    return "as-expected" if run.as_expected else "not-as-expected"


class Known:
    """All that the pages show. Keeps the history's reading open for the trends; `close` it."""

    def __init__(self, out: Path, reading: Reading, catalogue: catalog.Catalog, now_ns: int) -> None:
        self.out = out
        self.now_ns = now_ns
        self._reading = reading
        rows = _rows(reading)
        folders = _folders(out)
        self.scenarios = tuple(_scenarios(out, rows, folders, catalogue))
        self.versions = tuple(sorted({version for one in self.scenarios for version in one.cells}, key=_newness, reverse=True))
        self.runs = {run.id: run for one in self.scenarios for run in one.runs}
        self.nights = nights.listed(out)

    def close(self) -> None:
        self._reading.close()

    def scenario(self, slug: str) -> Scenario | None:
        return next((one for one in self.scenarios if one.slug == slug), None)

    def trends(self, scenario: Scenario) -> tuple[Trend, ...]:
        """Every metric of a scenario; values that are no finite number are left out."""
        name, _, variant = scenario.id.partition(":")
        frame = self._reading.sql(
            "SELECT run, started_ns, metric, arm, value, low, high, unit FROM history "
            "WHERE scenario = ? AND variant = ? AND metric IS NOT NULL AND isfinite(value) ORDER BY arm = 'mitigated', arm, started_ns, run",
            (name, variant),
        )
        found: dict[str, dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
        units: dict[str, str] = {}
        for row in frame.itertuples(index=False):
            units[row.metric] = "" if words.absent(row.unit) else str(row.unit)
            low, high = (None if words.absent(end) else float(end) for end in (row.low, row.high))
            point = Point(run=row.run, started_ns=int(row.started_ns), value=float(row.value), low=low, high=high)
            found[row.metric][str(row.arm)].append(point)
        return tuple(
            Trend(metric=name, unit=units[name], arms={arm: tuple(points) for arm, points in arms.items()})
            for name, arms in sorted(found.items(), key=lambda item: (item[0].startswith("cost "), item[0]))
        )

    def folder(self, run: Run) -> Path:
        return self.out / run.slug / run.id

    @property
    def regressions(self) -> tuple[Mapping[str, Any], ...]:
        """As `Regression.as_json` gives them."""
        return self._regressions[0]

    @property
    def notices(self) -> tuple[str, ...]:
        """What is damaged or gone, a line each."""
        complaint = self._regressions[1]
        return (*self._notices(), *([complaint] if complaint else ()))

    def _notices(self) -> Iterator[str]:
        for bad in self._reading.broken:
            yield f"History file {Path(str(bad.path)).name} cannot be read, its runs are missing here: {bad.reason}"
        gone = sum(not run.there for run in self.runs.values())
        if gone:
            yield f"{gone} of {len(self.runs)} runs are in the history alone: their folders are gone, so they have no report."
        for one in self.nights:
            if one.problem:
                yield f"Night {one.id}: {one.problem}"

    @cached_property
    def _regressions(self) -> tuple[tuple[Mapping[str, Any], ...], str]:
        """Those of the latest night: as it found them itself, else as the history gives them; and a complaint where that cannot be asked."""
        night = next((one for one in self.nights if one.state == "finished"), None)
        if night is not None and "regressions" in night.load():
            return night.regressions(), ""
        known = night is not None and any(run.night == night.id for run in self.runs.values())
        try:
            return tuple(one.as_json() for one in trends.regressions(self._reading, night.id if night and known else None)), ""
        except Exception as error:  # noqa: BLE001  whatever a foreign history does to the tests, its runs can be shown
            return (), f"Regressions could not be computed: {type(error).__name__}: {error}"

    def earlier_regressions(self, most: int) -> list[Mapping[str, Any]]:
        """Those that nights before the latest found, each once."""
        found: dict[tuple[str, ...], Mapping[str, Any]] = {}
        for night in [one for one in self.nights if one.state == "finished"][1 : most + 1]:
            for one in night.regressions():
                found.setdefault(
                    tuple(str(one.get(name)) for name in ("scenario", "metric", "arm", "kind", "first_bad_run")), one
                )
        return list(found.values())

    def changes(self, points: Sequence[Point]) -> list[Point]:
        """The points from which on a metric stayed elsewhere."""
        return [points[index] for index in trends.change_points([point.value for point in points])]


def read(out: Path, *, now_ns: int, paths: Sequence[Path] = ()) -> Known:
    """What is known of the runs in `out`; titles, layers and tags come from the catalogue, with the folders `paths` of one's own."""
    return Known(out, history(out), catalog.load(paths), now_ns)


def slug_of(scenario: str, variant: str) -> str:
    """The name of a scenario's folder; a name that no scenario can have gets a harmless one that is still its own."""
    name = f"{scenario}.{variant}" if variant else scenario
    if all(SCENARIO.fullmatch(part) and part not in RESERVED for part in ((scenario, variant) if variant else (scenario,))):
        return name
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:40]
    return f"{plain or 'scenario'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _rows(reading: Reading) -> list[dict[str, Any]]:
    frame = reading.sql(
        "SELECT DISTINCT run, scenario, variant, failure_mode, started_ns, torch, python, host, git, verdict, expected, "
        "as_expected, mitigation, took_s, night FROM history ORDER BY started_ns, run"
    )
    frame = frame.astype(object).where(frame.notna(), None)
    return frame.to_dict("records")


def _folders(out: Path) -> dict[str, set[str]]:
    """Folder of a scenario -> ids of the runs in it, by one listing of each: much cheaper than a look at every run."""
    found: dict[str, set[str]] = {}
    try:
        names = [entry.name for entry in os.scandir(out) if entry.is_dir() and entry.name not in RESERVED]
    except OSError:
        return {}
    for name in names:
        if not SCENARIO.fullmatch(name.partition(".")[0]):
            continue
        with os.scandir(out / name) as entries:
            ids = {entry.name for entry in entries if RUN_ID.fullmatch(entry.name)}
        if ids:
            found[name] = ids
    return found


def _scenarios(
    out: Path, rows: Sequence[Mapping[str, Any]], folders: Mapping[str, set[str]], catalogue: catalog.Catalog
) -> Iterator[Scenario]:
    told = {one.id: one for one in catalogue.scenarios}
    runs: dict[str, list[Run]] = defaultdict(list)
    modes: dict[str, str] = {}
    slugs: dict[str, str] = {}
    for row in rows:
        name = f"{row['scenario']}:{row['variant']}" if row["variant"] else row["scenario"]
        slug = slugs.setdefault(name, slug_of(row["scenario"], row["variant"] or ""))
        modes[name] = row["failure_mode"] or ""
        runs[name].append(_run(row, name, slug, folders))
    for slug in folders:
        slugs.setdefault(slug.replace(".", ":", 1), slug)
    for name, slug in sorted(slugs.items()):
        known = told.get(name)
        mine = tuple(runs[name])
        absent = folders.get(slug, set()) - {run.id for run in mine}
        facts = _text(out / slug, sorted(folders.get(slug, ()), reverse=True)) if known is None else {}
        yield Scenario(
            id=name,
            slug=slug,
            title=words.clip(known.title if known else facts.get("title") or "", 200),
            layer=words.clip(known.layer if known else facts.get("layer") or UNKNOWN, 40),
            tags=known.tags if known else (),
            failure_mode=words.clip(known.failure_mode if known else modes.get(name, ""), 80),
            runs=mine,
            cells=_cells(mine),
            odd=tuple((one, _matter(out / slug / one)) for one in sorted(absent, reverse=True)),
        )


def _run(row: Mapping[str, Any], name: str, slug: str, folders: Mapping[str, set[str]]) -> Run:
    torch, python = (words.clip(row[one] or UNKNOWN, 40) for one in ("torch", "python"))
    return Run(
        id=row["run"],
        scenario=name,
        slug=slug,
        started_ns=int(row["started_ns"]),
        version=Version(torch.partition("+")[0], python),
        verdict=words.clip(row["verdict"] or UNKNOWN, 40),
        expected=row["expected"],
        as_expected=None if row["as_expected"] is None or not row["expected"] else bool(row["as_expected"]),
        mitigation=row["mitigation"],
        host=row["host"],
        git=row["git"],
        took_s=row["took_s"],
        night=row["night"],
        there=row["run"] in folders.get(slug, ()),
    )


def _cells(runs: Sequence[Run]) -> dict[Version, Cell]:
    by_version: dict[Version, list[Run]] = defaultdict(list)
    for run in runs:
        by_version[run.version].append(run)
    found = {}
    for version, mine in by_version.items():
        judged = [run.as_expected for run in mine if run.as_expected is not None]
        size = max(1, -(-len(judged) // BINS))
        bins = [judged[start : start + size] for start in range(0, len(judged), size)]
        found[version] = Cell(
            last=mine[-1],
            runs=len(mine),
            judged=len(judged),
            good=sum(judged),
            rates=tuple(sum(one) / len(one) for one in bins),
        )
    return found


def _text(folder: Path, ids: Sequence[str]) -> Mapping[str, Any]:
    """What the latest readable run says of a scenario that the catalogue lacks."""
    for one in ids[:3]:
        try:
            return read_json(folder / one / "run.json").get("scenario_text") or {}
        except DtprobeError:
            continue
    return {}


def _matter(folder: Path) -> str:
    """Why a run folder is not in the history, in words."""
    try:
        run = RunFolder.open(folder)
    except DtprobeError as error:
        return f"damaged: {error.message}"
    if run.state == "unfinished":
        return "in progress" if run.running() else "unfinished: it was killed, or runs on another host"
    told = {"finished": "finished, but not in this history", "interrupted": "interrupted by its user"}
    return told.get(run.state, f"in the state {words.clip(run.state, 40)}")


def _newness(version: Version) -> tuple[Any, ...]:
    return tuple(_release(one) for one in (version.torch, version.python))


def _release(text: str) -> Release:
    try:
        return Release(text)
    except InvalidVersion:
        return Release("0")
