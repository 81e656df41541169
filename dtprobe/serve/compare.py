"""Two runs side by side: what they found, where, with what, and which figures are further apart than their noise."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dtprobe.errors import DtprobeError
from dtprobe.report import words
from dtprobe.scenario import ARMS
from dtprobe.site.known import Known, Point, Run
from dtprobe.site.pages import name_of, when
from dtprobe.store.files import read_json


@dataclass(frozen=True, kw_only=True)
class Line:
    """One thing in both runs. `told` says in words whether they differ, "" where nothing can be said."""

    name: str
    a: str
    b: str
    differs: bool
    told: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    a: Run
    b: Run
    facts: tuple[Line, ...]
    metrics: tuple[Line, ...]
    arms: tuple[Line, ...]
    notices: tuple[str, ...]


def compare(known: Known, a: Run, b: Run) -> Comparison:
    """Verdicts and metrics from the history, versions and arms from the run folders where they still are."""
    notices: list[str] = []
    told = [_facts_of(known, run, notices) for run in (a, b)]
    if a.scenario != b.scenario:
        notices.append(f"These are runs of two scenarios, {a.scenario} and {b.scenario}: few of their figures mean the same.")
    return Comparison(
        a=a,
        b=b,
        facts=tuple(_facts(a, b, *told)),
        metrics=tuple(_metrics(_values(known, a), _values(known, b))),
        arms=tuple(_arms(*told)),
        notices=tuple(notices),
    )


def _facts_of(known: Known, run: Run, notices: list[str]) -> Mapping[str, Any]:
    try:
        return read_json(known.folder(run) / "run.json")
    except DtprobeError:
        notices.append(f"{run.id}: its run.json cannot be read, so its arms and versions are missing here.")
        return {}


def _line(name: str, a: Any, b: Any) -> Line:
    left, right = (words.clip(one, 300) if one not in (None, "") else "-" for one in (a, b))
    return Line(name=name, a=left, b=right, differs=left != right, told="differs" if left != right else "same")


def _facts(a: Run, b: Run, run_a: Mapping[str, Any], run_b: Mapping[str, Any]) -> Iterator[Line]:
    expectation = {True: "as expected", False: "not as expected", None: "no expectation"}
    yield _line("scenario", a.scenario, b.scenario)
    yield _line("verdict", a.verdict, b.verdict)
    yield _line("expected", a.expected, b.expected)
    yield _line("outcome", expectation[a.as_expected], expectation[b.as_expected])
    yield _line("cure", a.mitigation, b.mitigation)
    yield _line("started", when(a.started_ns), when(b.started_ns))
    yield _line("took", words.number(a.took_s, "s"), words.number(b.took_s, "s"))
    yield _line("host", a.host, b.host)
    yield _line("commit", a.git, b.git)
    yield _line("Python", a.version.python, b.version.python)
    for name in ("seed", "repeats", "world_size"):
        yield _line(name.replace("_", " "), run_a.get(name), run_b.get(name))
    left, right = (run.get("versions") or {} for run in (run_a, run_b))
    for name in sorted({*left, *right}):
        yield _line(name, left.get(name), right.get(name))
    left, right = (run.get("machine") or {} for run in (run_a, run_b))
    for name in ("kernel", "cpu", "cores"):
        yield _line(name, left.get(name), right.get(name))


def _values(known: Known, run: Run) -> dict[tuple[str, str], tuple[Point, str]]:
    scenario = known.scenario(run.slug)
    found = {}
    for trend in known.trends(scenario) if scenario else ():
        for arm, points in trend.arms.items():
            for point in points:
                if point.run == run.id:
                    found[trend.metric, arm] = (point, trend.unit)
    return found


def _metrics(a: Mapping[tuple[str, str], tuple[Point, str]], b: Mapping[tuple[str, str], tuple[Point, str]]) -> Iterator[Line]:
    for metric, arm in sorted({*a, *b}, key=lambda key: (key[0], ARMS.index(key[1]) if key[1] in ARMS else len(ARMS))):
        left, right = a.get((metric, arm)), b.get((metric, arm))
        unit = (left or right or (None, ""))[1]
        told, differs = _told(left[0] if left else None, right[0] if right else None)
        yield Line(name=f"{name_of(metric, unit)}, {arm}", a=_shown(left), b=_shown(right), differs=differs, told=told)


def _shown(value: tuple[Point, str] | None) -> str:
    if value is None:
        return "-"
    point, unit = value
    span = words.interval(point.low, point.high, unit)
    return words.number(point.value, unit) + (f" ({span})" if span else "")


def _told(a: Point | None, b: Point | None) -> tuple[str, bool]:
    if a is None or b is None:
        return "only in one", True
    if a.value == b.value:
        return "same", False
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return "differs, no interval", True
    apart = a.high < b.low or b.high < a.low
    return ("apart: intervals do not meet" if apart else "within the noise"), apart


def _arms(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Line]:
    left, right = (run.get("arms") or {} for run in (a, b))
    for arm in (*ARMS, *sorted({*left, *right} - set(ARMS))):
        if arm in left or arm in right:
            yield _line(arm, _arm(left.get(arm)), _arm(right.get(arm)))


def _arm(arm: Mapping[str, Any] | None) -> str:
    if not arm:
        return ""
    environ = [f"{name}={value}" for name, value in (arm.get("env") or {}).items()]
    text = shlex.join([*environ, str(arm.get("program") or ""), *map(str, arm.get("args") or ())])
    return " | ".join([text, *map(str, arm.get("faults") or ())])
