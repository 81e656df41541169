"""What is known of before: earlier runs of the scenarios from the history, and runs of this night that its own account lacks."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dtprobe import machine, report
from dtprobe.clock import SystemClock
from dtprobe.errors import DtprobeError
from dtprobe.store import RunFolder, Store, history
from dtprobe.suite.progress import Step
from dtprobe.suite.rows import Ran
from dtprobe.suite.standing import Earlier

NOTHING = Earlier()

EARLIER = """
    WITH runs AS (SELECT DISTINCT run, scenario, variant, as_expected FROM history
                  WHERE torch = $1 AND python = $2 AND coalesce(night, '') <> $3 AND verdict NOT IN ('unsupported'))
    SELECT scenario, variant, count(*) FILTER (WHERE as_expected) AS k, count(*) AS n FROM runs GROUP BY ALL
"""


def earlier(out: Path, night: str) -> Mapping[str, Earlier]:
    """Of each scenario the runs before this night with the versions of torch and Python that are installed."""
    facts = machine.machine_facts(environ=os.environ)
    reading = history(out)
    try:
        found = reading.sql(EARLIER, [_torch(facts.versions), facts.python, night])
    finally:
        reading.close()
    return {
        row.scenario + (f":{row.variant}" if row.variant else ""): Earlier(k=int(row.k), n=int(row.n))
        for row in found.itertuples()
    }


def _torch(versions: Mapping[str, str]) -> str:
    return versions.get("torch", "")


def suspected(out: Path, night: str) -> Mapping[str, int]:
    """Scenarios of which a metric looks worse than in earlier nights and was not measured often enough to say so: how many runs are lacking."""
    from dtprobe import trends

    reading = history(out)
    try:
        return trends.suspects(reading, night)
    finally:
        reading.close()


def regressions(out: Path, night: str) -> list[dict[str, Any]]:
    """What has become worse in this night, as `dtprobe.trends` finds it in the history."""
    from dtprobe import trends

    reading = history(out)
    try:
        return [one.as_json() for one in trends.regressions(reading, night)]
    finally:
        reading.close()


def adopted(out: Path, night: str, known: Collection[Step]) -> list[Ran]:
    """The runs of a night that was killed which have a verdict that the night had not taken down yet.

    One that was killed between its verdict and its end is brought to its end.
    """
    store, clock, found = Store(out), SystemClock(), dict[Step, Ran]()
    for path in store.paths():
        try:
            run = RunFolder.open(path)
            verdict = run.verdict() if run.facts.get("night") == night else None
        except DtprobeError:
            continue  # damaged by the kill: it is run again
        step = run.scenario, int(run.facts.get("number") or 0)
        if verdict is None or step in known or step in found:
            continue
        if run.state == "unfinished":
            report.write(run.path)
            store.finish(run, now_ns=clock.now_ns)
        found[step] = row_of(run, verdict, out)
    return list(found.values())


def row_of(run: RunFolder, verdict: Mapping[str, Any], out: Path) -> Ran:
    """The row of a finished run."""
    facts = run.facts
    supported = verdict["verdict"] != "unsupported"
    status = ("as-expected" if verdict["as_expected"] else "not-as-expected") if supported else "unsupported"
    ended_ns = facts.get("ended_ns") or facts["started_ns"]
    texts = facts.get("scenario_text") or {}
    return Ran(
        scenario=run.scenario,
        number=int(facts.get("number") or 0),
        status=status,
        verdict=str(verdict["verdict"]),
        expected=verdict.get("expected"),
        mitigation=str(verdict["mitigation"]),
        because=str(verdict["because"]),
        took_s=round((ended_ns - facts["started_ns"]) / 1e9, 3),
        folder=os.path.relpath(run.path, out),
        title=texts.get("title", ""),
        claim=texts.get("claim", ""),
        metrics=verdict.get("metrics") or {},
        seed=facts.get("seed"),
        host=str((facts.get("machine") or {}).get("host") or ""),
    )
