"""What recorders took by their own account: a probe that begins to cost 5 % is found the next night, and jitter is not."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from dtprobe.store.rows import OWN, rows_of
from dtprobe.trends import regressions

sys.path.insert(0, str(Path(__file__).parent))
from simulated import DAY_NS, START_NS, InMemory

sys.path.pop(0)

NIGHTS = 12
SHARES = {"proc": 0.0098, "flight_recorder": 0.0022, "logs": 0.0018}
"""Medians over 443 arm runs of a night of 76 scenarios; their 90th percentiles are 0.0099, 0.0028 and 0.0019."""


def run(scenario: str, number: int, shares: dict[str, float]) -> list[dict[str, Any]]:
    began = START_NS + number * DAY_NS
    recorders = {name: {"cpu_s": share * 9, "stopped_s": 0.0} for name, share in shares.items()}
    arm_run = {
        "arm": "control",
        "traced": False,
        "started_ns": began,
        "ended_ns": began + 9_000_000_000,
        "recorders": recorders,
    }
    facts = {
        "id": f"{number:03d}-{scenario}",
        "scenario": scenario,
        "started_ns": began,
        "machine": {"host": "h", "python": "3.11.7"},
        "night": f"night-{number:03d}",
        "git": f"{number:040x}",
        "arm_runs": [arm_run, {**arm_run, "arm": "fault", "recorders": {"proc": {"cpu_s": 9.0}}}],
    }
    return rows_of(facts, {"verdict": "reproduced", "as_expected": True, "mitigation": "held", "torch": "2.13.0"}, took_s=60.0)


def history(seed: int, more: float = 0.0, scenarios: int = 40) -> InMemory:
    rng = random.Random(seed)
    rows = []
    for number in range(NIGHTS + 1):
        for at in range(scenarios):
            shares = {name: share * rng.lognormvariate(0, 0.15) for name, share in SHARES.items()}
            if number == NIGHTS:
                shares["proc"] += more
            rows += run(f"s-{at}", number, shares)
    return InMemory(rows)


def test_a_run_says_what_each_recorder_took_of_its_control_arm():
    own = {row["metric"]: row["value"] for row in run("s", 0, {"proc": 0.02}) if row["metric"].startswith(OWN)}
    assert own == {f"{OWN}proc": pytest.approx(0.02)}


@pytest.mark.parametrize("seed", range(5))
def test_a_probe_that_begins_to_take_five_percent_is_found_the_next_night(seed):
    (found,) = regressions(history(seed, more=0.05))
    assert (found.kind, found.metric, found.first_bad_run[:3]) == ("cost", f"{OWN}proc", f"{NIGHTS:03d}")
    assert "before" in found.because and found.after - found.before == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize("seed", range(10))
def test_unchanged_nights_and_what_no_one_would_notice_raise_nothing(seed):
    assert regressions(history(seed)) == ()
    assert regressions(history(seed, more=0.002)) == ()
