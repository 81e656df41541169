"""Scenarios as pytest items: in which order they are begun, and which may run beside which."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from dtprobe import catalog
from dtprobe.suite import plugin

CONTENT = Path(__file__).resolve().parents[1] / "content"


def locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_one_that_is_to_be_alone_is_not_passed_by_those_that_come_after_it(tmp_path: Path) -> None:
    began: list[str] = []

    def take(name: str, alone: bool) -> None:
        with plugin._turn(tmp_path, alone=alone):
            began.append(name)

    with plugin._turn(tmp_path, alone=False):
        assert not locked(tmp_path / plugin.GATE)
        single = threading.Thread(target=take, args=("single", True))
        single.start()
        until = time.monotonic() + 20
        while not locked(tmp_path / plugin.GATE):
            assert time.monotonic() < until
            time.sleep(0.005)
        later = [threading.Thread(target=take, args=("later", False)) for _ in range(3)]
        for one in later:
            one.start()
        later[0].join(0.1)
        assert began == []
    for one in (single, *later):
        one.join(20)
    assert began == ["single", "later", "later", "later"]


def collected(tmp_path: Path, expects_s: dict[str, float]) -> list[str]:
    """Items of a night that expects the scenarios to take so long, in the order in which they are begun."""
    steps = {name: [0, 1] if name == "quick:plain" else [0] for name in expects_s}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"steps": steps, "expects_s": expects_s}))
    words = ["-q", "--collect-only", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(CONTENT)]
    words += ["-p", "dtprobe", "--scenarios", "--scenario-plan", str(plan)]
    argv = [sys.executable, "-m", "pytest", *words, str(CONTENT / "scenarios" / "quick" / "scenario.py")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_the_longest_is_begun_first_where_a_night_knows(tmp_path: Path) -> None:
    found = collected(tmp_path, {"quick:plain": 3, "quick:crashes": 20, "quick:needy": 8})
    assert found == ["quick:crashes", "quick:needy", "quick:plain", "quick:plain#2"]


def test_where_nothing_is_known_a_long_one_is_followed_by_shorter_ones_and_none_is_lost(tmp_path: Path) -> None:
    names = ("quick:hangs", "quick:crashes", "quick:needy", "quick:plain")  # the arms of the first have the shortest limits
    found = collected(tmp_path, dict.fromkeys(names, 60.0))
    assert found == ["quick:plain", "quick:crashes", "quick:hangs", "quick:plain#2", "quick:needy"]


def test_outside_of_nights_scenarios_stay_where_they_are(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-c", os.devnull]
    argv += ["--rootdir", str(CONTENT), "-p", "dtprobe", "--scenarios", str(CONTENT / "scenarios" / "quick" / "scenario.py")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    found = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert found == [one.id for one in catalog.scenarios_of(CONTENT / "scenarios" / "quick")]


def test_a_night_measures_the_cost_of_half_the_scenarios_and_each_in_half_of_the_nights() -> None:
    scenarios, nights = [f"scenario-{number}" for number in range(60)], [f"202611{day:02}T220000Z-1" for day in range(1, 31)]
    taken = {(night, one): plugin.Plan(belongs={"night": night}).measures_cost(one) for night in nights for one in scenarios}
    assert all(15 <= sum(taken[night, one] for one in scenarios) <= 45 for night in nights)
    assert all(5 <= sum(taken[night, one] for night in nights) <= 25 for one in scenarios)
    same = sum(taken[nights[0], one] == taken[nights[1], one] for one in scenarios)
    assert 15 <= same <= 45, "no two nights measure the same ones"
    assert all(plugin.Plan().measures_cost(one) for one in scenarios), "in no night"


def test_a_resumed_night_measures_what_it_would_have(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"steps": {"a": [0]}, "belongs": {"night": "20261130T220000Z-1"}}))
    first, second = (plugin.Plan.of(tmp_path / "plan.json") for _ in range(2))
    assert first is not None and second is not None
    assert [first.measures_cost(f"s{n}") for n in range(99)] == [second.measures_cost(f"s{n}") for n in range(99)]


def test_only_where_its_cost_is_measured_a_scenario_is_also_run_without_recorders(tmp_path: Path) -> None:
    nights = [f"202611{day:02}T220000Z-1" for day in range(1, 31)]
    for measures in (True, False):
        night = next(one for one in nights if plugin.Plan(belongs={"night": one}).measures_cost("quick:plain") is measures)
        out, plan = tmp_path / str(measures), tmp_path / f"{measures}.json"
        plan.write_text(json.dumps({"steps": {"quick:plain": [0]}, "belongs": {"night": night}}))
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(CONTENT)]
        argv += [
            "-p",
            "dtprobe",
            "--scenarios",
            "--scenario-plan",
            str(plan),
            "--scenario-out",
            str(out),
            "--scenario-repeats",
            "1",
        ]
        argv += [str(CONTENT / "scenarios" / "quick" / "scenario.py")]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
        assert list(out.glob("quick.plain/*/control/0")), done.stdout + done.stderr
        assert bool(list(out.glob("quick.plain/*/bare/0"))) is measures
