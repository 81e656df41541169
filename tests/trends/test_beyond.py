"""The decision about metrics: exact, family-wise, dated, and told as long as it lasts."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dtprobe.trends import regressions, suspects
from dtprobe.trends.beyond import ALPHA, MOST, SINCE, chance, moves, wanted_of

sys.path.insert(0, str(Path(__file__).parent))
from simulated import DAY_NS, START_NS, InMemory

sys.path.pop(0)


def rows(number: int, values: list[float], scenario: str = "leak", **more: Any) -> list[dict[str, Any]]:
    common = {
        "scenario": scenario,
        "variant": "",
        "metric": "threads",
        "arm": "fault",
        "unit": "threads",
        "host": "h",
        "torch": "2.13.0",
    }
    common |= {
        "verdict": "partly",
        "as_expected": True,
        "night": f"night-{number:03d}",
        "git": f"{number:040x}",
        "python": "3.11.7",
        **more,
    }
    start = START_NS + number * DAY_NS
    return [
        {**common, "run": f"{number}-{scenario}-{at}", "started_ns": start + at, "value": value}
        for at, value in enumerate(values)
    ]


def found(every: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(one.kind, one.last_good_run, one.first_bad_run) for one in regressions(InMemory(every))]


@pytest.mark.parametrize(("before", "since"), [(4, 1), (5, 2), (6, 3)])
def test_the_chance_that_all_runs_lie_beyond_is_what_it_says_whatever_the_distribution(before: int, since: int) -> None:
    rng, times = random.Random(1), 20_000
    for draw in (rng.random, lambda: rng.paretovariate(0.5), lambda: float(rng.random() < 0.3)):
        hits = 0
        for _ in range(times):
            old, new = [draw() for _ in range(before)], [draw() for _ in range(since)]
            hits += min(new) > max(old) or max(new) < min(old)
        # chance() of one test that has half of ALPHA is twice the probability itself
        assert hits / times <= chance(before, since, 1) / 2 * 1.1


def test_the_more_runs_and_the_fewer_series_the_sooner_it_is_decided() -> None:
    assert [wanted_of(n, 900) for n in (12, 20, 30, 60)] == [13, 9, 7, 5]
    assert wanted_of(12, 10) < wanted_of(12, 900) < wanted_of(12, 900, nights=2) <= MOST
    assert wanted_of(5, 900) == MOST + 1


def test_a_night_asks_for_the_runs_that_decide_and_then_has_decided() -> None:
    before = [row for night in range(12) for row in rows(night, [4.0])]
    lacks = suspects(InMemory([*before, *rows(12, [5.0])]), "night-012")
    assert lacks == {"leak": wanted_of(12, 1) - 1}
    assert found([*before, *rows(12, [5.0])]) == []
    whole = [*before, *rows(12, [5.0] * wanted_of(12, 1))]
    assert found(whole) == [("metric", "11-leak-0", "12-leak-0")]
    assert suspects(InMemory(whole), "night-012") == {}
    assert suspects(InMemory([*before, *rows(12, [5.0, 4.0])]), "night-012") == {}, "one run like the others ends it"


def test_what_is_worse_stays_told_with_the_same_date_for_a_week_and_is_then_the_usual() -> None:
    every = [row for night in range(20) for row in rows(night, [4.0])] + rows(20, [5.0] * 9)
    for night in range(21, 20 + SINCE):
        every += rows(night, [5.0])
        assert found(every) == [("metric", "19-leak-0", "20-leak-0")]
    assert found([*every, *rows(20 + SINCE, [5.0])]) == []
    assert found([*every, *rows(20 + SINCE - 1, [4.0])]) == [], "it went back"


def test_nights_of_one_run_decide_together_what_none_could_alone_and_date_it() -> None:
    every = [row for night in range(40) for row in rows(night, [4.0])]
    told = []
    for night in range(40, 46):
        every += rows(night, [5.0])
        told.append(found(every))
    assert told[0] == told[1] == [] and told[-1] == [("metric", "39-leak-0", "40-leak-0")]


def test_noise_is_no_change_and_a_value_beyond_the_margin_is() -> None:
    rng = random.Random(3)
    before = [row for night in range(30) for row in rows(night, [rng.lognormvariate(0, 0.5)])]
    frame = pd.DataFrame(before)
    top = frame["value"].max()
    within = [*before, *rows(30, [top * 1.05] * 12)]
    beyond = [*before, *rows(30, [top * 30] * 12)]
    assert found(within) == [] and found(beyond) == [("metric", "29-leak-0", "30-leak-0")]


def test_an_accepted_level_is_forgotten_so_that_the_way_back_is_seen() -> None:
    every = [row for night in range(30) for row in rows(night, [4.0])] + [
        row for night in range(30, 50) for row in rows(night, [9.0])
    ]
    every += rows(50, [7.0] * 12)
    assert found(every) == [("metric", "49-leak-0", "50-leak-0")]


def test_a_single_run_after_the_night_does_not_hide_what_the_night_found() -> None:
    every = [row for night in range(20) for row in rows(night, [4.0])] + rows(20, [5.0] * 9)
    alone = rows(21, [4.0], scenario="other", night=None)
    assert found([*every, *alone]) == [("metric", "19-leak-0", "20-leak-0")]


def test_a_move_tells_its_windows_and_its_p() -> None:
    every = [row for night in range(20) for row in rows(night, [4.0])] + rows(20, [5.0] * 9)
    (move,) = moves(pd.DataFrame(every), "night-020")
    assert (move.above, move.nights, len(move.before), len(move.now)) == (True, 1, 20, 9) and move.p < ALPHA


@pytest.mark.parametrize("verdicts", [["unsupported"], ["unsupported", "partly"], ["inconclusive"]])
def test_nights_in_which_nothing_was_measured_raise_nothing(verdicts: list[str]) -> None:
    nothing = {"metric": None, "arm": None, "value": None, "unit": None}
    every = [
        {**row, **(nothing if verdict == "unsupported" else {})}
        for number in range(6)
        for at, verdict in enumerate(verdicts)
        for row in rows(number, [3.0], scenario=f"one-{at}", verdict=verdict)
    ]
    assert not regressions(InMemory(every)) and not suspects(InMemory(every), "night-005")
