"""What the history says of a run: rows, one a metric and arm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dtprobe.scenario import ARMS

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS: Mapping[str, str] = {
    "run": "string",
    "scenario": "string",
    "variant": "string",
    "failure_mode": "string",
    "started_ns": "int64",
    "torch": "string",
    "python": "string",
    "host": "string",
    "git": "string",
    "seed": "int64",
    "verdict": "string",
    "expected": "string",
    "as_expected": "bool",
    "mitigation": "string",
    "metric": "string",
    "arm": "string",
    "value": "double",
    "low": "double",
    "high": "double",
    "n": "int64",
    "unit": "string",
    "night": "string",
    "kernel": "string",
    "cores": "int64",
    "world_size": "int64",
    "launch": "string",
    "took_s": "double",
}
"""Column -> Arrow type. One row a metric and arm; a run without metrics is one row with null `metric` and `arm`.

What the recorders cost is a metric too, `cost <their names>`, a ratio of arm `control`. `night` names the suite that the run belonged to.
"""

LATER = ("night", "kernel", "cores", "world_size", "launch", "took_s")
"""Columns that files of earlier versions lack; there they are null."""

COST = "cost "
"""How the names of those metrics begin."""
OWN = f"{COST}own "
"""Likewise of what each recorder took by its own account: share of a core that it used, and of the time that it held ranks."""


def rows_of(run: Mapping[str, Any], verdict: Mapping[str, Any], took_s: float | None = None) -> list[dict[str, Any]]:
    """A finished run's rows, from the contents of its `run.json` and `verdict.json`; `took_s` where `run.json` has no end yet."""
    if took_s is None and run.get("ended_ns"):
        took_s = (run["ended_ns"] - run["started_ns"]) / 1e9
    machine = run.get("machine") or {}
    git = run.get("git")
    common = {
        "run": run["id"],
        "scenario": run["scenario"],
        "variant": run.get("variant") or "",
        "failure_mode": verdict.get("failure_mode") or run.get("failure_mode"),
        "started_ns": run["started_ns"],
        "torch": verdict.get("torch"),
        "python": machine.get("python"),
        "host": machine.get("host"),
        "git": git.get("commit") if isinstance(git, Mapping) else git,
        "seed": run.get("seed"),
        "verdict": verdict["verdict"],
        "expected": verdict.get("expected"),
        "as_expected": verdict.get("as_expected"),
        "mitigation": verdict.get("mitigation"),
        "night": run.get("night"),
        "kernel": machine.get("kernel"),
        "cores": machine.get("cores"),
        "world_size": run.get("world_size"),
        "launch": run.get("launch"),
        "took_s": took_s,
    }
    rows = []
    for name, metric in (verdict.get("metrics") or {}).items():
        for arm in ARMS:
            if metric.get(arm) is None:
                continue
            low, high = (metric.get("intervals") or {}).get(arm) or (None, None)
            measured = {"value": metric[arm], "low": low, "high": high, "n": (metric.get("n") or {}).get(arm)}
            rows.append({**common, "metric": name, "arm": arm, "unit": metric.get("unit"), **measured})
    for names, cost in (verdict.get("overhead") or {}).items():
        measured = {"value": cost.get("ratio"), "low": cost.get("low"), "high": cost.get("high"), "n": cost.get("n")}
        rows.append({**common, "metric": f"{COST}{names}", "arm": "control", "unit": "ratio", **measured})
    for name, share in _own(run.get("arm_runs") or ()).items():
        measured = {"value": share, "low": None, "high": None, "n": None}
        rows.append({**common, "metric": f"{OWN}{name}", "arm": "control", "unit": "share", **measured})
    return rows or [common]


def _own(arm_runs: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Of each recorder, its processor time and the time for which it stopped ranks, over the time of the control runs that it recorded."""
    busy, lasted = dict[str, float](), dict[str, float]()
    for one in arm_runs:
        seconds = ((one.get("ended_ns") or 0) - (one.get("started_ns") or 0)) / 1e9
        if one.get("arm") != "control" or one.get("traced") or seconds <= 0:
            continue
        for name, told in (one.get("recorders") or {}).items():
            busy[name] = busy.get(name, 0.0) + (told.get("cpu_s") or 0.0) + (told.get("stopped_s") or 0.0)
            lasted[name] = lasted.get(name, 0.0) + seconds
    return {name: busy[name] / lasted[name] for name in busy}


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The rows as an Arrow table with exactly COLUMNS."""
    import pyarrow as pa

    return pa.Table.from_pylist([dict(row) for row in rows], schema=schema())


def schema() -> pa.Schema:
    """COLUMNS as Arrow has them."""
    import pyarrow as pa

    return pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()])
