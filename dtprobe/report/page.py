"""The content of a run's report: a frozen model that the HTML and the Markdown renderer both print.

Built from the run folder alone, so that a report can be made again at any time.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dtprobe.report import findings, output, series, timeline, words
from dtprobe.report.load import RunFolder
from dtprobe.scenario import ARMS

VERDICTS: Mapping[str, tuple[str, str]] = {
    "reproduced": ("Reproduced", "What the document says happens here."),
    "partly": ("Partly true", "Some of what the document says happens here, some does not."),
    "refuted": ("Refuted", "What the document says does not happen here; what does is below."),
    "not-reproduced": ("Not reproduced", "The symptom did not show in this run. That alone does not refute the claim."),
    "inconclusive": ("Inconclusive", "This run decides nothing about the claim."),
    "unsupported": ("Unsupported here", "This machine lacks what the scenario needs. Nothing was tested, nothing passed."),
    "survived": ("Survived", "The command came through the faults that fired."),
    "not-survived": ("Not survived", "The command did not come through the faults."),
    "not-fired": ("Not fired", "A fault never fired: nothing is said about what it would have done."),
    "error": ("Error", "The harness or the judge failed. Nothing is said about the claim."),
}
"""Verdict -> its words on the badge, and what it means."""

NO_VERDICT = ("No verdict", "The run ended before a verdict was reached. What it recorded until then is below.")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A metric in one arm. `value` is "-" where the arm was not run or could not be measured."""

    arm: str
    value: str
    interval: str
    n: int | None
    method: str


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """A metric over the arms, ready to print, and the numbers behind it: arm -> (value, low, high).

    `about` has its unit, where that is a mere word, and the methods of its intervals. `documented_values` are the figures in
    `documented`, where they are on the scale of the points.
    """

    name: str
    about: str
    documented: str
    documented_values: tuple[float, ...]
    cells: tuple[Cell, ...]
    points: Mapping[str, tuple[float, float, float]]
    unit: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a recorder costs the worker: the ratio of times with and without it, printed as what it adds.

    `lost` says that the interval holds zero: this run cannot tell the cost from none.
    """

    probe: str
    more: str
    interval: str
    lost: bool
    n: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A recorder that could not record, or whose record has a flaw. `remedy` is empty where nothing helps."""

    probe: str
    where: str
    text: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """A hang that recorders suspected while the job lived, in how many repeats of an arm, and when."""

    arm: str
    repeats: str
    at: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that a report says, in the order in which it is read."""

    scenario: str
    title: str
    failure_mode: str
    run: str
    started: str
    state: str
    verdict: str
    badge: str
    meaning: str
    claim: str
    truth: str
    source: str
    mitigation: str
    no_cure_because: str
    expected: str
    as_expected: bool | None
    notices: tuple[str, ...]
    arms: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    metrics: tuple[MetricRow, ...]
    growth: series.Growth
    timelines: tuple[timeline.Timeline, ...]
    injected: tuple[findings.Injected, ...]
    outcomes: tuple[findings.Outcome, ...]
    partings: tuple[findings.Parting, ...]
    lines: tuple[output.Line, ...]
    stacks: tuple[findings.Stack, ...]
    tables: tuple[findings.Table, ...]
    suspicions: tuple[Suspicion, ...]
    costs: tuple[Cost, ...]
    troubles: tuple[Trouble, ...]
    layer: str
    certifies_not: str
    machine: tuple[tuple[str, str], ...]
    versions: tuple[tuple[str, str], ...]
    commands: tuple[tuple[str, str], ...]
    workload: tuple[tuple[str, str], ...]
    files: tuple[str, ...]


def build(folder: RunFolder) -> Page:
    """The page of a run folder; works for every verdict, for runs that were cut off, and where arms or frames are missing."""
    run, verdict = folder.run, folder.verdict or {}
    text = run.get("scenario_text") or {}
    name = str(run.get("scenario") or verdict.get("scenario") or folder.path.parent.name)
    if run.get("variant") and ":" not in name:
        name = f"{name}:{run['variant']}"
    kind = str(verdict.get("verdict") or "")
    badge, meaning = VERDICTS.get(kind, NO_VERDICT)
    lines = output.lines(folder)
    return Page(
        scenario=words.clip(name, 120),
        title=_sentence(words.clip(text.get("title") or run.get("failure_mode") or name, 200)),
        failure_mode=words.clip(run.get("failure_mode") or verdict.get("failure_mode") or "", 80),
        run=words.clip(run.get("id") or folder.path.name, 80),
        started=_when(run.get("started_ns")),
        state="finished" if folder.done else str(run.get("state") or "unfinished"),
        verdict=kind if kind in VERDICTS else "none",
        badge=badge,
        meaning=meaning,
        claim=words.clip(verdict.get("claim") or text.get("claim") or "", 2000),
        truth=words.clip(verdict.get("because") or "", 4000),
        source=words.clip(text.get("source") or "", 400),
        mitigation=str(verdict.get("mitigation") or "none"),
        no_cure_because=words.clip(text.get("no_cure_because") or "", 1000),
        expected=words.clip(verdict.get("expected") or "", 80),
        as_expected=verdict.get("as_expected") if verdict.get("expected") else None,
        arms=tuple(folder.arms),
        facts=_facts(folder),
        metrics=_metrics(folder),
        growth=series.growth(folder),
        timelines=timeline.timelines(folder),
        injected=findings.injected(folder),
        outcomes=findings.outcomes(folder),
        partings=findings.partings(folder),
        lines=lines,
        stacks=findings.stacks(folder),
        tables=findings.tables(folder),
        suspicions=_suspicions(folder),
        costs=_costs(verdict.get("overhead")),
        troubles=_troubles(folder),
        layer=words.clip(text.get("layer") or "", 40),
        certifies_not=words.clip(text.get("certifies_not") or "", 2000),
        machine=_pairs({key: value for key, value in (run.get("machine") or {}).items() if key != "versions"}),
        versions=_pairs({"git commit": _commit(run.get("git")), **(run.get("versions") or {})}),
        commands=_commands(folder, name),
        workload=_workload(folder),
        files=_files(folder),
        notices=_notices(folder),  # last: reading the frames has found what cannot be read
    )


def _notices(folder: RunFolder) -> tuple[str, ...]:
    found = []
    if folder.run.get("state") == "interrupted":
        found.append("This run was interrupted; it shows what was recorded until then.")
    elif not folder.done:
        found.append("This run is unfinished: it was killed, or it still runs. It shows what was recorded until now.")
    ran = {item.get("arm") for item in folder.arm_runs}
    silent = [arm for arm in folder.arms if arm not in ran]
    if silent and folder.arm_runs:
        found.append(f"Not run: the {words.listed(silent)} arm{'s' if len(silent) > 1 else ''}.")
    if ran and not any(folder.has_frame(name) for name in ("proc", "events", "log_lines", "collectives", "stacks")):
        found.append(
            "No frames were made of the recorders' artifacts: figures and evidence are missing, the raw files are listed."
        )
    return tuple([*found, *(words.clip(problem, 300) for problem in folder.problems)])


def _facts(folder: RunFolder) -> tuple[tuple[str, str], ...]:
    run, verdict = folder.run, folder.verdict or {}
    world_size = run.get("world_size") or max((len(item.get("ranks") or ()) for item in folder.arm_runs), default=0)
    facts = []
    if folder.arms:
        facts.append(("Arms", words.listed(folder.arms)))
    if run.get("repeats") is not None:
        facts.append(("Repeats", str(run["repeats"])))
    if world_size:
        facts.append(("World size", str(world_size)))
    torch = verdict.get("torch") or (run.get("versions") or {}).get("torch")
    if torch:
        facts.append(("torch", words.clip(torch, 40)))
    if run.get("started_ns") and run.get("ended_ns"):
        facts.append(("Took", words.number((run["ended_ns"] - run["started_ns"]) / 1e9, "s")))
    if run.get("seed") is not None:
        facts.append(("Seed", str(run["seed"])))
    return tuple(facts)


def _metrics(folder: RunFolder) -> tuple[MetricRow, ...]:
    rows = []
    for name, metric in ((folder.verdict or {}).get("metrics") or {}).items():
        if not isinstance(metric, dict):
            continue
        unit = words.clip(metric.get("unit") or "", 24)
        cells: list[Cell] = []
        points: dict[str, tuple[float, float, float]] = {}
        scaled = unit if unit in words.MEASURES else ""  # any other unit is said once, beside the name
        for arm in folder.arms or ARMS:
            value = metric.get(arm)
            low, high = (metric.get("intervals") or {}).get(arm) or (None, None)
            n = (metric.get("n") or {}).get(arm)
            cells.append(
                Cell(
                    arm=arm,
                    value=words.number(value, scaled),
                    interval=words.interval(low, high, scaled) if value is not None and not low == high == value else "",
                    n=n if value is not None else None,
                    method=words.clip((metric.get("method") or {}).get(arm) or "", 40),
                )
            )
            ends = [float(value if end is None else end) for end in (value, low, high)] if value is not None else []
            if ends and all(math.isfinite(end) for end in ends):
                points[arm] = (ends[0], ends[1], ends[2])
        rows.append(
            MetricRow(
                name=words.clip((str(name).removesuffix("_s") if unit == "s" else str(name)).replace("_", " "), 80),
                about="; ".join(
                    dict.fromkeys([*([unit] if unit and not scaled else []), *(cell.method for cell in cells if cell.method)])
                ),
                documented=words.clip(metric.get("documented") or "", 200),
                documented_values=figures_of(str(metric.get("documented") or ""), unit),
                cells=tuple(cells),
                points=points,
                unit=unit,
            )
        )
    return tuple(sorted(rows, key=lambda row: not row.documented))


def figures_of(documented: str, unit: str) -> tuple[float, ...]:
    """The figure, or both of "3 to 47", that a documented text begins with; none where its unit may be another than ours."""
    number = r"[+-]?\d[\d,]*(?:\.\d+)?"
    match = re.match(rf"\s*({number})(?:\s+to\s+({number}))?\s*(.*)", documented, flags=re.DOTALL)
    if match is None or (match[3] not in ("", unit) and not match[3].startswith("(")):
        return ()
    return tuple(float(figure.replace(",", "")) for figure in match.groups()[:2] if figure)


def _suspicions(folder: RunFolder) -> tuple[Suspicion, ...]:
    seen: dict[tuple[str, str], list[tuple[Any, float | None]]] = {}
    for run in sorted(folder.arm_runs, key=lambda run: ("fault", "mitigated", "control").index(run["arm"])):
        for item in run.get("suspected") or []:
            if isinstance(item, dict):
                since = (item["t_ns"] - run["started_ns"]) / 1e9 if item.get("t_ns") and run.get("started_ns") else None
                seen.setdefault((str(run.get("arm")), words.clip(item.get("reason") or "", 400)), []).append(
                    (run.get("repeat"), since)
                )
    found = []
    for (arm, reason), moments in seen.items():
        times = [since for _, since in moments if since is not None]
        found.append(
            Suspicion(
                arm=arm,
                repeats=words.listed(dict.fromkeys(repeat for repeat, _ in moments)),
                at=f"after {words.interval(min(times), max(times), 's')}" if times else "",
                reason=reason,
            )
        )
    return tuple(found[:20])


def _costs(overhead: Any) -> tuple[Cost, ...]:
    found = []
    for probe, cost in (overhead or {}).items():
        if not isinstance(cost, dict) or cost.get("ratio") is None:
            continue
        low, high = cost.get("low"), cost.get("high")
        found.append(
            Cost(
                probe=words.clip(probe, 60),
                more=_percent(cost["ratio"]),
                interval=f"{_percent(low)} to {_percent(high)}" if low is not None and high is not None else "",
                lost=low is not None and high is not None and low <= 1 <= high,
                n=str(cost.get("n") or "-"),
                what=words.clip(cost.get("what") or "", 200),
            )
        )
    return tuple(found)


def _percent(ratio: float) -> str:
    percent = (float(ratio) - 1) * 100
    return f"{percent:+.1f} %" if abs(percent) < 100 else f"{float(ratio):.1f} x"


def _troubles(folder: RunFolder) -> tuple[Trouble, ...]:
    found = []
    for probe, why in (folder.run.get("unavailable") or {}).items():
        reason, remedy = (why.get("reason"), why.get("remedy")) if isinstance(why, dict) else (why, "")
        found.append(
            Trouble(
                probe=words.clip(probe, 60),
                where="whole run",
                text=words.clip(reason or "", 400),
                remedy=words.clip(remedy or "", 400),
            )
        )
    seen: dict[tuple[str, str], list[str]] = {}
    for run in folder.arm_runs:
        for probe, recorded in (run.get("recorders") or {}).items():
            for text in (recorded.get("problems") if isinstance(recorded, dict) else None) or []:
                seen.setdefault((str(probe), words.clip(text, 400)), []).append(f"{run.get('arm')}/{run.get('repeat')}")
    for (probe, text), places in seen.items():
        found.append(Trouble(probe=words.clip(probe, 60), where=words.listed(places, 5), text=text, remedy=""))
    frame = folder.frame("problems", "source", "kind", "text", rows=2000)
    for row in frame.head(20).itertuples():
        found.append(
            Trouble(
                probe="reader",
                where=folder.place(row.source, row.arm, row.repeat).text,
                text=words.clip(f"{row.kind}: {row.text}", 400),
                remedy="",
            )
        )
    return tuple(found[:40])


def _workload(folder: RunFolder) -> tuple[tuple[str, str], ...]:
    """Arm -> the command of each rank, with the variables the scenario sets and the injections it asks for."""
    found = []
    for arm, item in (folder.run.get("arms") or {}).items():
        if not isinstance(item, dict):
            continue
        env = [f"{key}={value}" for key, value in (item.get("env") or {}).items()]
        words_of = [*env, str(item.get("program") or ""), *(str(arg) for arg in item.get("args") or ())]
        faults = "".join(f"  --fault {shlex.quote(str(fault))}" for fault in item.get("faults") or ())
        found.append((words.clip(arm, 20), words.clip(shlex.join(words_of) + faults, 600)))
    return tuple(found)


def _commands(folder: RunFolder, name: str) -> tuple[tuple[str, str], ...]:
    run = folder.run
    seed = f" --seed {run['seed']}" if run.get("seed") is not None else ""
    identity = shlex.quote(str(run.get("id") or folder.path.name))
    argv = [str(item) for item in run.get("argv") or []]
    program = argv[0].rpartition("/")[2] if argv else ""
    started = shlex.join(["dtprobe" if program in ("dtprobe", "__main__.py") else argv[0], *argv[1:]]) if argv else ""
    again: list[tuple[str, str]] = []
    if str((folder.verdict or {}).get("schema")).startswith("dtprobe.injection/"):
        command = shlex.join(argv[argv.index("--") + 1 :]) if "--" in argv else "COMMAND..."
        again.append(("At the very calls where it fired", f"dtprobe inject --replay {identity} -- {command}"))
    else:
        again.append(("The same again, with the same seed", f"dtprobe run {shlex.quote(name)}{seed}"))
        again.append(("In a fresh checkout", f"make scenario NAME={shlex.quote(name)}"))
    if started:
        again.append(("As it was started", words.clip(started, 1000)))
    again.append(("This report, made again from the run folder", f"dtprobe show {identity} --report"))
    return tuple(again)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _commit(git: Any) -> Any:
    return f"{git.get('commit')}{', with changes' if git.get('dirty') else ''}" if isinstance(git, dict) else git


def _pairs(mapping: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(mapping, dict):
        return ()
    found = []
    for key, value in mapping.items():
        if value is None or value in ("", [], {}):
            continue
        shown = words.listed(value, 20) if isinstance(value, list) else value
        if isinstance(value, dict):
            shown = ", ".join(f"{inner} {content}" for inner, content in value.items())
        label = str(key).replace("_", " ")
        if label.endswith(" bytes"):
            label, shown = label.removesuffix(" bytes"), words.number(value, "B")
        found.append((words.clip(label, 60), words.clip(shown, 400)))
    return tuple(found[:60])


def _files(folder: RunFolder) -> tuple[str, ...]:
    """What a reader may want to open: the folders of the arms, the frames, the trace."""
    found = [
        name
        for name in ("run.json", "verdict.json", "trace.json", "report.md")
        if (folder.path / name).is_file() or name in ("trace.json", "report.md")
    ]
    found += sorted(f"frames/{path.name}" for path in (folder.path / "frames").glob("*.parquet"))
    for run in folder.arm_runs[:60]:
        path = f"{run.get('arm')}/{run.get('repeat')}"
        if (folder.path / path).resolve().is_relative_to(folder.path.resolve()) and (folder.path / path).is_dir():
            found.append(f"{path}/")
    return tuple(found)


def _when(t_ns: Any) -> str:
    if not isinstance(t_ns, int):
        return ""
    return datetime.fromtimestamp(t_ns / 1e9, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
