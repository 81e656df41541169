"""Baselines: what nights measured on one kind of machine, pinned in a file, and how a later night differs from it.

A figure differs where its interval and the pinned one do not meet. Of one repeat no noise is known, so it is not compared. A night that is
pinned into an existing file widens its intervals: repeats within a night scatter less than nights do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from dtprobe.errors import UsageError
from dtprobe.store.files import write_json

SCHEMA: Literal["dtprobe.baseline/1"] = "dtprobe.baseline/1"

MACHINE = ("kernel", "architecture", "distribution", "cpu", "cores", "memory_bytes", "gpus", "nvidia_driver", "python")
"""What of the machine's facts decides figures; names, loads and what is free at the moment do not."""

ARMS = ("control", "fault", "mitigated")
RANGE = "range of the intervals of several nights"


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


class Figure(BaseModel):
    """A metric of one arm with its spread."""

    value: float
    low: float
    high: float
    n: int
    method: str


class Figures(BaseModel):
    """A metric of those arms that have it."""

    unit: str
    control: Figure | None = None
    fault: Figure | None = None
    mitigated: Figure | None = None


class Measured(BaseModel):
    """What one scenario came to."""

    verdict: str
    mitigation: str
    metrics: dict[str, Figures]


class Baseline(BaseModel):
    """A baseline's file."""

    schema_: Literal["dtprobe.baseline/1"] = Field(default=SCHEMA, alias="schema")
    nights: list[str] = Field(min_length=1)
    """Oldest first."""
    machine: dict[str, Any]
    versions: dict[str, str]
    seed: int | None = None
    repeats: int | None = None
    jobs: int | None = None
    scenarios: dict[str, Measured]


def pinned(summary: Mapping[str, Any]) -> Baseline:
    """The baseline of a night, from its summary.json: machine, versions, seed, repeats, and the figures of what was as expected, with their spread."""
    known = summary["machine"]
    return Baseline(
        nights=[summary["night"]],
        machine={name: known.get(name) for name in MACHINE},
        versions=summary["versions"],
        seed=summary["seed"],
        repeats=summary["repeats"],
        jobs=summary["jobs"],
        scenarios={row["scenario"]: _measured(row) for row in summary["scenarios"] if row["status"] == "as-expected"},
    )


def _measured(row: Mapping[str, Any]) -> Measured:
    metrics = {
        name: Figures(unit=metric["unit"], **{arm: _figure(metric, arm) for arm in ARMS})
        for name, metric in row["metrics"].items()
    }
    return Measured(verdict=row["verdict"], mitigation=row["mitigation"], metrics=metrics)


def _figure(metric: Mapping[str, Any], arm: str) -> Figure | None:
    value, interval = metric.get(arm), (metric.get("intervals") or {}).get(arm)
    if value is None or interval is None:
        return None
    return Figure(value=value, low=interval[0], high=interval[1], n=metric["n"][arm], method=metric["method"][arm])


def write(path: Path, summary: Mapping[str, Any]) -> None:
    """Pin a night into a file; one that exists is widened. UsageError where that is no baseline, or one of other machines or versions."""
    found = pinned(summary)
    if path.exists():
        earlier = load(path, "--pin")
        if differs := elsewhere(earlier, summary):
            raise UsageError(
                f"--pin {path}: {differs}", "give another file: figures of unlike machines have no spread in common"
            )
        found = widened(earlier, found)
    write_json(path, found.model_dump(by_alias=True))


def widened(earlier: Baseline, later: Baseline) -> Baseline:
    """The later baseline with what the earlier one has besides: scenarios, nights, and of each figure of an equal verdict the whole range."""
    scenarios = dict(earlier.scenarios)
    for name, now in later.scenarios.items():
        then = earlier.scenarios.get(name)
        alike = then is not None and (then.verdict, then.mitigation) == (now.verdict, now.mitigation)
        scenarios[name] = _ranging(then, now) if then is not None and alike else now
    nights = dict.fromkeys([*earlier.nights, *later.nights])
    return later.model_copy(update={"scenarios": dict(sorted(scenarios.items())), "nights": list(nights)})


def _ranging(then: Measured, now: Measured) -> Measured:
    return now.model_copy(update={"metrics": {name: _wider(then.metrics.get(name), new) for name, new in now.metrics.items()}})


def _wider(old: Figures | None, new: Figures) -> Figures:
    if old is None or old.unit != new.unit:
        return new
    return Figures(unit=new.unit, **{arm: _range(getattr(old, arm), getattr(new, arm)) for arm in ARMS})


def _range(then: Figure | None, now: Figure | None) -> Figure | None:
    if then is None or now is None:
        return now
    return now.model_copy(
        update={"low": min(then.low, now.low), "high": max(then.high, now.high), "n": then.n + now.n, "method": RANGE}
    )


def load(path: Path, option: str = "--against") -> Baseline:
    """A baseline from its file; UsageError, naming the option that gave it, where it cannot be read or is none."""
    try:
        return Baseline.model_validate_json(path.read_bytes())
    except OSError as error:
        why = str(error.strerror or error)
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
    raise UsageError(f"{option} {path}: {why}", "give a file that --pin wrote")


def differences(baseline: Baseline, summary: Mapping[str, Any]) -> list[Difference]:
    """Of the scenarios that both have a verdict of, as expected or not, what differs: first verdicts and cures, then figures."""
    old, new = baseline.scenarios, _comparable(baseline, summary)
    found = [
        Difference(scenario=name, what=what, pinned=then, now=now)
        for name, own in new.items()
        for what, then, now in (
            ("verdict", old[name].verdict, own.verdict),
            ("cure", old[name].mitigation, own.mitigation),
        )
        if then != now
    ]
    return [*found, *(one for name, own in new.items() for one in _moved(name, old[name].metrics, own.metrics))]


def _comparable(baseline: Baseline, summary: Mapping[str, Any]) -> dict[str, Measured]:
    rows = [row for row in summary["scenarios"] if row["verdict"] not in ("", "unsupported", "error")]
    return {row["scenario"]: _measured(row) for row in rows if row["scenario"] in baseline.scenarios}


def _moved(scenario: str, old: Mapping[str, Figures], new: Mapping[str, Figures]) -> Iterator[Difference]:
    for name, arm in ((name, arm) for name in new if name in old for arm in ARMS):
        then, now = getattr(old[name], arm), getattr(new[name], arm)
        if then is None or now is None or min(then.n, now.n) < 2:
            continue
        if now.low > then.high or now.high < then.low:
            unit = new[name].unit
            yield Difference(scenario=scenario, what=f"{name} of {arm}", pinned=_shown(then, unit), now=_shown(now, unit))


def _shown(figure: Figure, unit: str) -> str:
    return f"{figure.value:.3g} ({figure.low:.3g} to {figure.high:.3g}, n={figure.n}) {unit}".rstrip()


def compared(baseline: Baseline, summary: Mapping[str, Any]) -> dict[str, Any]:
    """For summary.json: which night is pinned, how many of its scenarios were compared, how the machine is another one, what differs."""
    found = differences(baseline, summary)
    count = f"{len(found)} differ" if len(found) > 1 else "1 differs" if found else "nothing differs"
    return {
        "night": baseline.nights[-1],
        "headline": f"{count} ({len(_comparable(baseline, summary))} of {len(baseline.scenarios)} pinned scenarios compared)",
        "elsewhere": elsewhere(baseline, summary),
        "differs": [one.as_json() for one in found],
    }


def elsewhere(baseline: Baseline, summary: Mapping[str, Any]) -> str:
    """How the machine is another than the baseline's, or nothing: figures of unlike machines tell nothing about a change."""
    mine = pinned(summary)
    both = [(name, mine.machine.get(name), baseline.machine.get(name)) for name in ("cpu", "cores", "gpus")]
    both.append(("torch", mine.versions.get("torch"), baseline.versions.get("torch")))
    return "; ".join(f"{name} {now}, pinned {then}" for name, now, then in both if now != then)
