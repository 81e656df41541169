"""A night pinned in a file, and how a later one differs from it."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dtprobe.cli import app
from dtprobe.errors import UsageError
from dtprobe.suite import baseline

COMMITTED = sorted((Path(__file__).parents[2] / "reports" / "baselines").glob("*.json"))


def night(value: float = 1.0, spread: float = 0.1, n: int = 5, verdict: str = "reproduced") -> dict:
    metric = {
        "unit": "s",
        "fault": value,
        "control": None,
        "mitigated": None,
        "intervals": {"fault": [value - spread, value + spread]},
        "n": {"fault": n},
        "method": {"fault": "bootstrap 95 %"},
    }
    row = {"scenario": "leak", "status": "as-expected", "verdict": verdict, "mitigation": "held", "metrics": {"took_s": metric}}
    machine = {"cpu": "c", "cores": 2, "gpus": [], "python": "3.11.7", "host": "h", "load_1m": 3.0}
    return {
        "night": "n",
        "machine": machine,
        "versions": {"torch": "2.13.0"},
        "seed": 0,
        "repeats": None,
        "jobs": 2,
        "scenarios": [row],
    }


def test_a_night_like_the_pinned_one_differs_in_nothing(tmp_path):
    baseline.write(tmp_path / "b.json", night())
    pinned = baseline.load(tmp_path / "b.json")
    assert "host" not in pinned.machine and "load_1m" not in pinned.machine
    assert baseline.compared(pinned, night(1.15))["headline"].startswith("nothing differs (1 of 1 "), "the intervals meet"


@pytest.mark.parametrize(
    ("now", "what"),
    [(night(1.5), "took_s of fault"), (night(0.5), "took_s of fault"), (night(verdict="refuted"), "verdict")],
)
def test_what_differs_beyond_its_noise_is_told_with_both_values(now, what):
    (one,) = baseline.differences(baseline.pinned(night()), now)
    assert one.what == what and one.pinned in one.because and one.now in one.because


def test_a_second_night_widens_what_is_pinned_and_keeps_what_it_did_not_run(tmp_path):
    path = tmp_path / "b.json"
    first, second = night(1.0), night(1.5) | {"night": "m"}
    other = copy.deepcopy(first["scenarios"][0]) | {"scenario": "other"}
    first["scenarios"].append(other)
    baseline.write(path, first)
    baseline.write(path, second)
    found = baseline.load(path)
    assert found.nights == ["n", "m"] and set(found.scenarios) == {"leak", "other"}
    figure = found.scenarios["leak"].metrics["took_s"].fault
    assert (figure.low, figure.high, figure.n) == (0.9, 1.6, 10)
    assert not baseline.differences(found, night(1.2)) and baseline.differences(found, night(1.8))
    baseline.write(path, night(9.0, verdict="refuted"))
    figure = baseline.load(path).scenarios["leak"].metrics["took_s"].fault
    assert (figure.low, figure.n) == (8.9, 5), "another verdict has figures of its own"


def test_pinning_into_what_is_no_baseline_or_another_machine_s_changes_nothing(tmp_path):
    path = tmp_path / "b.json"
    other = night()
    other["machine"] |= {"cores": 32}
    for text, says in (("{}", "--pin"), (json.dumps(baseline.pinned(other).model_dump(by_alias=True)), "cores 2, pinned 32")):
        path.write_text(text)
        with pytest.raises(UsageError, match=says):
            baseline.write(path, night())
        assert path.read_text() == text


def test_one_repeat_has_no_noise_to_compare_with():
    assert not baseline.differences(baseline.pinned(night(n=1, spread=0)), night(9.0))
    assert not baseline.differences(baseline.pinned(night()), night(9.0, n=1, spread=0))


def test_what_was_not_as_expected_is_not_pinned():
    odd = night()
    odd["scenarios"][0]["status"] = "broken"
    assert not baseline.pinned(odd).scenarios


def test_what_is_not_as_expected_any_more_is_compared_all_the_same():
    broken = night(verdict="refuted")
    broken["scenarios"][0]["status"] = "not-as-expected"
    (one,) = baseline.differences(baseline.pinned(night()), broken)
    assert (one.what, one.pinned, one.now) == ("verdict", "reproduced", "refuted")


def test_what_did_not_run_is_not_told_as_the_same():
    absent = night()
    absent["scenarios"][0] |= {"status": "unsupported", "verdict": "unsupported", "metrics": {}}
    assert "0 of 1 pinned scenarios compared" in baseline.compared(baseline.pinned(night()), absent)["headline"]


def test_another_machine_is_told():
    other = copy.deepcopy(night())
    other["machine"]["cores"] = 32
    assert baseline.compared(baseline.pinned(night()), other)["elsewhere"] == "cores 32, pinned 2"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "{",
        "[]",
        '{"schema": "dtprobe.suite/1"}',
        '{"schema": "dtprobe.baseline/1", "nights": ["n"], "machine": {}, "versions": {}, "scenarios": {"leak": 3}}',
    ],
)
def test_what_is_no_baseline_is_one_line(tmp_path, text):
    path = tmp_path / "b.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match="--against") as told:
        baseline.load(path)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_baselines_say_where_and_how_often_they_were_measured(path):
    found = baseline.load(path)
    assert found.machine["gpus"] and found.versions["torch"] and found.scenarios
    figures = [figures for one in found.scenarios.values() for figures in one.metrics.values()]
    assert figures and all(one.control or one.fault or one.mitigated for one in figures)


def test_a_night_pins_itself_and_is_compared(tmp_path):
    (tmp_path / "scenarios" / "calm").mkdir(parents=True)
    (tmp_path / "scenarios" / "calm" / "worker.py").write_text("from dtprobe import record\nrecord('seen')\n")
    (tmp_path / "scenarios" / "calm" / "scenario.py").write_text(
        """
from dtprobe import Arm, Metric, Scenario, Verdict, VerdictKind
from dtprobe.stats import measured

scenario = Scenario(
    name="calm", failure_mode="healthy", title="t", claim="c", source="s", layer="process", certifies_not="n", world_size=1, repeats=2,
    needs=(), timeout_s=30, measures_cost=False, control=Arm("worker.py"), fault=Arm("worker.py"), no_cure_because="none",
    expect={"torch>=2.9": "refuted"},
)

@scenario.judge
def judge(evidence):
    seen = {
        arm: measured([float(len(own)) for _, own in evidence.events("seen", arm).groupby("repeat")]) for arm in ("control", "fault")
    }
    return Verdict(kind=VerdictKind.REFUTED, control_healthy=True, because="b", metrics={"seen": Metric(unit="", **seen)})
"""
    )
    pin, against = tmp_path / "b.json", tmp_path / "then.json"
    figure = {"value": 9.0, "low": 9.0, "high": 9.0, "n": 2, "method": "range"}
    known = {"verdict": "refuted", "mitigation": "none", "metrics": {"seen": {"unit": "", "fault": figure}}}
    then = {"schema": baseline.SCHEMA, "nights": ["then"], "machine": {}, "versions": {}, "scenarios": {"calm": known}}
    against.write_text(json.dumps(then))
    common = ["nightly", "--only", "calm", "--path", str(tmp_path), "--out", str(tmp_path / "runs"), "--retries", "0"]
    ended = CliRunner().invoke(app, [*common, "--pin", str(pin), "--against", str(against)])
    assert ended.exit_code == 0 and "1 differs" in ended.output, ended.output
    assert "seen of fault 1 (1 to 1, n=2), pinned 9" in ended.output
    (page,) = (tmp_path / "runs" / "suites").glob("*/summary.html")
    assert "Against the baseline" in page.read_text()
    assert "seen of fault" in page.with_suffix(".md").read_text()
    seen = baseline.load(pin).scenarios["calm"].metrics["seen"].fault
    assert seen is not None and seen.value == 1.0
