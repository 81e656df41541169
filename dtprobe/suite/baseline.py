"""Baselines: what a night measured on one kind of machine, pinned in a file, and how a later night differs from it.

A figure differs where its interval and the pinned one do not meet. Of one repeat no noise is known, so it is not compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtprobe.errors import UsageError
from dtprobe.store.files import write_json

SCHEMA = "dtprobe.baseline/1"

MACHINE = ("kernel", "architecture", "distribution", "cpu", "cores", "memory_bytes", "gpus", "nvidia_driver", "python")
"""What of the machine's facts decides figures; names, loads and what is free at the moment do not."""

ARMS = ("control", "fault", "mitigated")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A verdict, a cure or a figure that is not what the baseline has."""

    scenario: str
    what: str
    """`verdict`, `cure`, or metric and arm."""
    pinned: str
    now: str

    @property
    def because(self) -> str:
        """One line."""
        return f"{self.scenario}: {self.what} {self.now}, pinned {self.pinned}"

    def as_json(self) -> dict[str, str]:
        """For summary.json."""
        return {**asdict(self), "because": self.because}


def pinned(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The baseline of a night, from its summary.json: machine, versions, seed, repeats, and the figures of what was as expected, with their spread."""
    known = summary["machine"]
    return {
        "schema": SCHEMA,
        "night": summary["night"],
        "machine": {name: known.get(name) for name in MACHINE},
        "versions": summary["versions"],
        "seed": summary["seed"],
        "repeats": summary["repeats"],
        "jobs": summary["jobs"],
        "scenarios": {
            row["scenario"]: {
                "verdict": row["verdict"],
                "mitigation": row["mitigation"],
                "metrics": {name: _figures(metric) for name, metric in row["metrics"].items()},
            }
            for row in summary["scenarios"]
            if row["status"] == "as-expected"
        },
    }


def _figures(metric: Mapping[str, Any]) -> dict[str, Any]:
    every = {arm: _figure(metric, arm) for arm in ARMS}
    return {"unit": metric["unit"], **{arm: figure for arm, figure in every.items() if figure is not None}}


def _figure(metric: Mapping[str, Any], arm: str) -> dict[str, Any] | None:
    value, interval = metric.get(arm), (metric.get("intervals") or {}).get(arm)
    if value is None or interval is None:
        return None
    return {
        "value": value,
        "low": interval[0],
        "high": interval[1],
        "n": metric["n"][arm],
        "method": metric["method"][arm],
    }


def write(path: Path, summary: Mapping[str, Any]) -> None:
    """Pin a night into a file."""
    write_json(path, pinned(summary))


def load(path: Path) -> dict[str, Any]:
    """A baseline from its file; UsageError where it cannot be read or is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--against {path}: {error.strerror or error}", "give a file that --pin wrote") from None
    except ValueError:
        raise UsageError(f"--against {path}: not JSON", "give a file that --pin wrote") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or not isinstance(found.get("scenarios"), dict):
        raise UsageError(f"--against {path}: not of schema {SCHEMA}", "give a file that --pin wrote")
    return found


def differences(baseline: Mapping[str, Any], summary: Mapping[str, Any]) -> list[Difference]:
    """Of the scenarios that both have, what differs: first verdicts and cures, then figures."""
    old, new = baseline["scenarios"], pinned(summary)["scenarios"]
    both = [name for name in new if name in old]
    found = [
        Difference(scenario=name, what=what, pinned=str(old[name][key]), now=str(new[name][key]))
        for name in both
        for what, key in (("verdict", "verdict"), ("cure", "mitigation"))
        if old[name][key] != new[name][key]
    ]
    return [*found, *(one for name in both for one in _moved(name, old[name]["metrics"], new[name]["metrics"]))]


def _moved(scenario: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    for name, arm in ((name, arm) for name in new if name in old for arm in ARMS):
        then, now = old[name].get(arm), new[name].get(arm)
        if not then or not now or min(then["n"], now["n"]) < 2:
            continue
        if now["low"] > then["high"] or now["high"] < then["low"]:
            unit = new[name]["unit"]
            yield Difference(scenario=scenario, what=f"{name} of {arm}", pinned=_shown(then, unit), now=_shown(now, unit))


def _shown(figure: Mapping[str, Any], unit: str) -> str:
    return f"{figure['value']:.3g} ({figure['low']:.3g} to {figure['high']:.3g}, n={figure['n']}) {unit}".rstrip()


def compared(baseline: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """For summary.json: which night is pinned, how many verdicts and figures differ, how its machine is another one, what differs."""
    found = differences(baseline, summary)
    return {
        "night": baseline.get("night", ""),
        "headline": f"{len(found)} differ" if len(found) > 1 else "1 differs" if found else "nothing differs",
        "elsewhere": elsewhere(baseline, summary),
        "differs": [one.as_json() for one in found],
    }


def elsewhere(baseline: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """How the machine is another than the baseline's, or nothing: figures of unlike machines tell nothing about a change."""
    mine = pinned(summary)
    asked = [("cpu", "machine"), ("cores", "machine"), ("gpus", "machine"), ("torch", "versions")]
    unlike = [
        f"{name} {mine[where].get(name)}, pinned {baseline[where].get(name)}"
        for name, where in asked
        if mine[where].get(name) != baseline[where].get(name)
    ]
    return "; ".join(unlike)
