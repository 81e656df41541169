"""What a terminal shows of runs and of the doctor's findings, narrow or wide, hostile or damaged."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dtprobe.doctor import Answer, DoctorReport, Missing, ScenarioAnswer
from dtprobe.errors import DtprobeError, Unavailable
from dtprobe.report.terminal import Steps, render_doctor, render_runs, render_verdict
from dtprobe.store import RunFolder, Store

START = 1_750_000_000_000_000_000
SECOND = 10**9
METRICS = {
    "threads per cycle": {
        "control": 0.0,
        "fault": 3.0,
        "mitigated": None,
        "unit": "threads",
        "documented": "3 to 47",
        "intervals": {"control": [0.0, 0.0], "fault": [2.9, 3.1]},
        "n": {"control": 3, "fault": 3},
        "method": {},
    },
    "hang": {
        "control": 0.05,
        "fault": 4.0,
        "mitigated": 0.04,
        "unit": "s",
        "documented": "",
        "intervals": {},
        "n": {},
        "method": {},
    },
}
VERDICT: dict[str, Any] = {
    "schema": "dtprobe.verdict/1",
    "scenario": "leak",
    "failure_mode": "gloo-thread-leak",
    "verdict": "refuted",
    "mitigation": "held",
    "expected": "refuted",
    "as_expected": True,
    "metrics": METRICS,
    "because": "threads grow by three a group, not by forty-four",
    "claim": "threads grow from 3 to 47",
    "overhead": {"proc": {"ratio": 1.012, "low": 0.99, "high": 1.03, "n": 4, "what": "wall time"}},
    "torch": "2.13.0",
}


def shown(render: Any, what: Any, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    render(what, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "runs", need_bytes=0)


def run_of(store: Store, at_s: int = 0, verdict: dict[str, Any] | None = None, **facts: Any) -> RunFolder:
    run = store.create("leak", "", {"seed": 7, "failure_mode": "gloo-thread-leak", **facts}, started_ns=START + at_s * SECOND)
    if verdict is not None:
        run.write_verdict(verdict)
        store.finish(run, now_ns=lambda: START + (at_s + 5) * SECOND)
    return run


def test_a_verdict_is_shown_with_its_numbers_reason_cost_and_place(store: Store) -> None:
    run = run_of(
        store,
        verdict=VERDICT,
        scenario_text={"title": "Does it leak?"},
        unavailable={"perf": {"reason": "perf is not installed", "remedy": "apt-get install linux-perf"}},
    )
    run.write_text("report.html", "<p>")
    text = shown(render_verdict, run.path)
    for part in (
        "Refuted",
        "as expected",
        "Does it leak?",
        "threads grow from 3 to 47",
        "threads grow by three a group",
        "3 threads (2.9 to 3.1",
        "n=3)",
        "4 s",
        "50 ms",
        "the cure held",
        "proc +1.2 % (-1.0 to +3.0 %), n=4",
        "perf: perf is not installed (apt-get install linux-perf)",
        "seed 7",
        "torch 2.13.0",
        run.id,
        str(run.path / "report.html"),
    ):
        assert part in text
    row = next(line for line in text.splitlines() if line.startswith("threads per cycle"))
    assert row.split()[-1] == "-", "an arm that was not measured is a dash"


def test_what_was_expected_instead_is_said(store: Store) -> None:
    run = run_of(store, verdict=VERDICT | {"verdict": "partly", "as_expected": False})
    text = shown(render_verdict, run.path)
    assert "Partly true" in text
    assert "expected: refuted" in text


def test_the_place_of_the_report_is_one_unbroken_word_on_a_narrow_terminal(store: Store) -> None:
    run = run_of(store, verdict=VERDICT)
    (run.path / "report.html").write_text("")
    lines = shown(render_verdict, run.path, width=40).splitlines()
    assert any(str(run.path / "report.html") in line for line in lines)
    assert all(len(line) <= 40 for line in lines if str(store.out) not in line)


def test_a_run_in_progress_is_told_from_one_whose_harness_died(store: Store) -> None:
    arm_runs = [{"arm": "control", "repeat": 0}, {"arm": "fault", "repeat": 0}]
    finished = run_of(store, 0, VERDICT)
    run = run_of(store, 60, arm_runs=arm_runs)
    text = shown(render_verdict, run.path)
    assert "still running; arm runs done: control/0 and fault/0" in text
    run.close()
    text = " ".join(shown(render_verdict, run.path).split())
    assert "No verdict" in text
    assert "unfinished: its harness ended before the run did; arm runs done: control/0 and fault/0" in text
    assert f"The last finished run of this scenario is {finished.id}" in text


def test_an_interrupted_run_says_so(store: Store) -> None:
    run = run_of(store)
    store.interrupt(run, now_ns=lambda: START)
    assert "interrupted by its user; no arm run was done" in shown(render_verdict, run.path)


def test_text_from_a_run_is_never_markup_nor_an_escape(store: Store) -> None:
    hostile = "[bold]x[/] [/red] \x1b[31mred\x07 [link=file:///]y"
    metrics = {hostile: METRICS["hang"] | {"unit": hostile, "documented": hostile}}
    verdict = VERDICT | {
        "because": hostile,
        "claim": hostile,
        "metrics": metrics,
        "overhead": {hostile: {"ratio": 1.0, "n": 1}},
    }
    run = run_of(
        store, verdict=verdict, scenario_text={"title": hostile}, unavailable={hostile: {"reason": hostile, "remedy": hostile}}
    )
    text = shown(render_verdict, run.path)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count("[bold]x[/]") >= 3


@pytest.mark.parametrize("part", ["run.json", "verdict.json"])
def test_a_damaged_run_is_one_clear_error(store: Store, part: str) -> None:
    run = run_of(store, verdict=VERDICT)
    (run.path / part).write_text('{"cut')
    with pytest.raises(DtprobeError, match=rf"{part}: is not JSON"):
        shown(render_verdict, run.path)


@pytest.mark.parametrize(
    "verdict",
    [
        {},
        {"verdict": "no-such-kind"},
        VERDICT | {"metrics": {"m": {}}},
        VERDICT | {"metrics": None, "overhead": None, "torch": None},
    ],
)
def test_a_verdict_that_lacks_parts_is_shown_without_them(store: Store, verdict: dict[str, Any]) -> None:
    run = run_of(store)
    run.write_verdict(verdict)
    assert run.id in shown(render_verdict, run.path)


def test_runs_are_listed_with_state_and_verdict_and_damaged_ones_are_named(store: Store) -> None:
    first = run_of(store, 0, VERDICT)
    second = run_of(store, 1, VERDICT | {"verdict": "partly", "as_expected": False})
    dead = run_of(store, 2)
    dead.close()
    alive = run_of(store, 3)
    damaged = run_of(store, 4)
    (damaged.path / "run.json").write_text("")
    lines = shown(render_runs, store.runs()).splitlines()
    rows = {run.id: next(line for line in lines if line.rstrip().endswith(run.id)) for run in (first, second, dead, alive)}
    assert ("finished" in rows[first.id], "refuted" in rows[first.id], "yes" in rows[first.id]) == (True, True, True)
    assert "no: refuted" in rows[second.id]
    assert "unfinished" in rows[dead.id]
    assert "running" in rows[alive.id]
    assert any(line.startswith("damaged: ") and damaged.id in line for line in lines)
    assert [line.split()[-1] for line in lines[1:5]] == [alive.id, dead.id, second.id, first.id]


def test_no_runs_say_what_to_do() -> None:
    assert "dtprobe run NAME" in shown(render_runs, [])


def findings() -> DoctorReport:
    gdb = Answer("gdb", "the C debugger", Missing.of("gdb is not installed", apt=["gdb"]))
    ray = Answer("package:ray[x]", "Ray", Missing.of("the Python package ray is not installed", pip=["ray[x]"]))
    cuda = Answer("cuda", "a GPU", Unavailable("0 GPUs visible, 1 needed"))
    return DoctorReport(
        scenarios=(
            ScenarioAnswer("good", (), {}),
            ScenarioAnswer("less", (), {"perf": Unavailable("no perf", "install it")}),
            ScenarioAnswer("bad:gpu", (cuda, ray), {"perf": Unavailable("no perf")}),
        ),
        capabilities=(Answer("linux", "Linux", None), gdb, cuda),
    )


def test_the_doctor_tells_each_scenario_with_reasons_and_each_capability_with_remedies() -> None:
    text = shown(render_doctor, findings())
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "2 of 3 scenarios run here" in lines
    assert "good yes" in lines
    assert "less with less without perf: no perf (install it)" in lines
    assert "bad:gpu no cuda: 0 GPUs visible, 1 needed" in lines
    assert "package:ray[x]: the Python package ray is not installed (pip install 'ray[x]')" in lines
    assert "1 of 3 capabilities" in lines
    assert "linux yes Linux" in lines
    assert "gdb no gdb is not installed (apt-get install gdb)" in lines
    assert "apt-get install gdb" in lines
    assert "pip install 'ray[x]'" in lines


def test_install_lines_stay_whole_on_a_narrow_terminal() -> None:
    many = tuple(Answer(f"c{number}", "x", Missing.of("x", apt=[f"package-{number}"])) for number in range(20))
    text = shown(render_doctor, DoctorReport(scenarios=(), capabilities=many), width=40)
    assert any(
        line.strip() == "apt-get install " + " ".join(f"package-{number}" for number in range(20)) for line in text.splitlines()
    )


def test_progress_is_a_line_a_step_where_nobody_watches() -> None:
    console = Console(file=io.StringIO(), width=60, force_terminal=False)
    steps = Steps(console)
    steps.begin("leak", 2)
    steps.step("control, repeat 1 [bold]")
    steps.step("fault, repeat 1")
    steps.end()
    assert console.file.getvalue().splitlines() == ["leak [1/2] control, repeat 1 [bold]", "leak [2/2] fault, repeat 1"]  # type: ignore[attr-defined]


def test_progress_on_a_terminal_ends_cleanly_even_when_cut_short() -> None:
    console = Console(file=io.StringIO(), width=60, force_terminal=True)
    steps = Steps(console)
    steps.begin("leak", 2)
    steps.step("control, repeat 1 [bold]")
    steps.end()
    steps.end()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "control, repeat 1 [bold]" in text
    assert text.count("\x1b[?25h") == 1, "the cursor is shown again"


def test_json_on_disk_is_what_was_rendered(store: Store) -> None:
    run = run_of(store, verdict=VERDICT)
    assert json.loads((run.path / "verdict.json").read_text())["because"] in shown(render_verdict, run.path)
