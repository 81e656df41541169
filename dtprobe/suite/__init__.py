"""Many scenarios in one go, on pytest and xdist: what each said, in one summary with links to their reports."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import pytest

from dtprobe import machine
from dtprobe.clock import Clock, SystemClock
from dtprobe.errors import DtprobeError, UsageError
from dtprobe.scenario import Scenario
from dtprobe.store import Store
from dtprobe.store.files import write_json

SCHEMA = "dtprobe.suite/1"
FOLDER = "suites"
"""Below `--out`: `<utc>-<pid>/` with summary.json, summary.html, summary.md and junit.xml."""
PLUGIN = "dtprobe.suite.plugin"


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What became of one scenario. `status` is `as-expected`, `not-as-expected`, `unsupported`, `failed` (the harness) or `not-run`."""

    scenario: str
    status: str
    verdict: str = ""
    expected: str | None = None
    mitigation: str = "none"
    because: str = ""
    took_s: float = 0.0
    folder: str = ""
    """The run folder, relative to `--out`; empty where there is none."""
    title: str = ""
    claim: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """All of them, in the order in which they were asked for."""

    folder: Path
    rows: tuple[Ran, ...]
    took_s: float
    interrupted: bool
    facts: Mapping[str, Any]

    def count(self, status: str) -> int:
        return sum(row.status == status for row in self.rows)

    @property
    def well(self) -> bool:
        """Nothing was other than expected, and something ran."""
        odd = ("not-as-expected", "failed", "not-run")
        return not self.interrupted and self.count("as-expected") > 0 and not any(row.status in odd for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **self.facts,
            "took_s": round(self.took_s, 3),
            "interrupted": self.interrupted,
            "well": self.well,
            "scenarios": [asdict(row) for row in self.rows],
        }


class Follower(Protocol):
    """Is told how far a suite is."""

    def begin(self, total: int) -> None: ...

    def started(self, scenario: str) -> None: ...

    def ended(self, row: Ran) -> None: ...

    def end(self) -> None: ...


def run(
    scenarios: Sequence[Scenario],
    *,
    out: Path,
    jobs: int,
    repeats: int | None = None,
    seed: int = 0,
    follower: Follower,
    clock: Clock | None = None,
) -> SuiteResult:
    """Run the scenarios, `jobs` at a time, and write the summary into `<out>/suites/<utc>-<pid>/`.

    An interrupt ends what runs and is a result as well: what was not reached is `not-run`. Raises UsageError where nothing is to be
    run or `out` cannot be written, DtprobeError where pytest itself failed.
    """
    if not scenarios:
        raise UsageError("no scenario to run", "`dtprobe list` shows what there is")
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: nothing would run", "give 1 or more")
    clock = clock or SystemClock()
    Store.open(out)
    began_ns, began = clock.now_ns(), clock.monotonic()
    stamp = datetime.fromtimestamp(began_ns / 1e9, UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = out / FOLDER / f"{stamp}-{os.getpid()}"
    folder.mkdir(parents=True)
    follow = _Follow(scenarios, follower)
    follower.begin(len(scenarios))
    try:
        code = pytest.main(_arguments(scenarios, folder, out, jobs, repeats, seed), plugins=[follow])
    finally:
        follower.end()
    if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        raise DtprobeError(
            f"the suite could not be run: {follow.trouble or pytest.ExitCode(code).name}", "report it with the command"
        )
    result = SuiteResult(
        folder=folder,
        rows=tuple(follow.rows.get(one.id) or Ran(scenario=one.id, status="not-run", title=one.title) for one in scenarios),
        took_s=clock.monotonic() - began,
        interrupted=code == pytest.ExitCode.INTERRUPTED,
        facts={
            "began_ns": began_ns,
            "seed": seed,
            "repeats": repeats,
            "jobs": jobs,
            "machine": machine.machine_facts(environ=os.environ).as_json(),
            "versions": machine.versions(),
        },
    )
    write_json(folder / "summary.json", result.as_json())
    return result


def _arguments(scenarios: Sequence[Scenario], folder: Path, out: Path, jobs: int, repeats: int | None, seed: int) -> list[str]:
    """Of a pytest that knows nothing of the project it is started in: no ini file, no conftest, no cache, no terminal, no temporary folder."""
    files = dict.fromkeys(str(one.folder / "scenario.py") for one in scenarios)
    plugins = [
        word for name in (PLUGIN, "no:terminal", "no:cacheprovider", "no:faulthandler", "no:tmpdir") for word in ("-p", name)
    ]
    return [
        *("-c", os.devnull, "--rootdir", str(folder), "--noconftest", "--import-mode=importlib"),
        *plugins,
        *("-W", "ignore::pluggy.PluggyTeardownRaisedWarning"),  # an interrupt meets xdist's connections closed
        *("-n", str(jobs), "--dist", "worksteal", "--scenarios", "--scenario-seed", str(seed)),
        *("--scenario-out", str(out.resolve()), "--junit-xml", str(folder / "junit.xml")),
        *(("--scenario-repeats", str(repeats)) if repeats is not None else ()),
        *(word for one in scenarios for word in ("--scenario", one.id)),
        *files,
    ]


class _Follow:
    """A plugin of the controlling pytest: collects what the workers report."""

    def __init__(self, scenarios: Sequence[Scenario], follower: Follower) -> None:
        self._scenarios = {one.id: one for one in scenarios}
        self._follower = follower
        self.rows: dict[str, Ran] = {}
        self.trouble = ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._follower.started(nodeid.partition("::")[2])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2]
        if name not in self._scenarios or (report.when != "call" and report.outcome == "passed"):
            return
        told = dict(report.user_properties).get("dtprobe")
        self._ended(_row(self._scenarios[name], report.outcome, json.loads(str(told)) if told else None, _said(report)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.trouble = _said(report)

    def pytest_internalerror(self, excrepr: object) -> None:
        self.trouble = str(excrepr).strip().splitlines()[-1]

    def _ended(self, row: Ran) -> None:
        self.rows[row.scenario] = row
        self._follower.ended(row)


def _row(scenario: Scenario, outcome: str, told: Mapping[str, Any] | None, said: str) -> Ran:
    if told is None:
        return Ran(scenario=scenario.id, status="failed", because=said, title=scenario.title, claim=scenario.claim)
    status = {"passed": "as-expected", "skipped": "unsupported"}.get(outcome, "not-as-expected")
    return Ran(
        scenario=scenario.id,
        status=status,
        verdict=told["verdict"],
        expected=told["expected"],
        mitigation=told["mitigation"],
        because=told["because"],
        took_s=told["took_s"],
        folder=told["folder"],
        title=scenario.title,
        claim=scenario.claim,
        metrics=told["metrics"],
    )


def _said(report: pytest.TestReport | pytest.CollectReport) -> str:
    lines = str(report.longrepr or "").strip().splitlines()
    return lines[-1] if lines else ""


def load(path: Path) -> dict[str, Any]:
    """A summary.json, or that of a suite's folder. Raises UsageError for anything else."""
    file = path / "summary.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} is no summary of a suite: {error}", "name a folder below suites/") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise UsageError(f"{file} is no summary of a suite: its schema is not {SCHEMA}", "name a folder below suites/")
    return found
