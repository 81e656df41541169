"""Figures as SVG text."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from dtprobe.site.charts import MOST, Mark, sparkline, trend
from dtprobe.site.known import Point, Trend

DAY_NS = 86_400 * 10**9


def points(*values: float) -> tuple[Point, ...]:
    return tuple(
        Point(run=str(n), started_ns=n * DAY_NS, value=value, low=value - 1, high=value + 1) for n, value in enumerate(values)
    )


def classes(text: str) -> list[str]:
    return [element.get("class") or "" for element in ElementTree.fromstring(text).iter()]


def test_a_trend_shows_arms_and_marks_and_says_them_in_words() -> None:
    data = Trend(metric="time_s", unit="s", arms={"control": points(1, 1, 1), "fault": points(5, 5, 9)})
    marks = [
        Mark(at_ns=2 * DAY_NS, kind="regression", text="from 5 to <9>"),
        Mark(at_ns=DAY_NS, kind="version", text="torch 2"),
    ]
    drawn = str(trend(data, "a", marks))
    assert {"arm-of-control", "arm-of-fault", "mark-regression", "mark-version"} <= set(classes(drawn))
    said = ElementTree.fromstring(drawn).find("{*}desc") if "xmlns" in drawn else ElementTree.fromstring(drawn).find("desc")
    assert said is not None and said.text == "control from 1 s to 1 s; fault from 5 s to 9 s; from 5 to <9>"
    assert "mark-regression" not in classes(str(trend(data, "a", [])))


@pytest.mark.parametrize("values", [(3.0,), (0.0, 0.0), (-1e300, 1e300), (1e-320, 2e-320), (7.0,) * 9])
def test_no_values_leave_the_figure(values: tuple[float, ...]) -> None:
    drawn = str(trend(Trend(metric="m", unit="", arms={"fault": points(*values)}), "a", []))
    ElementTree.fromstring(drawn)
    assert "nan" not in drawn and "inf" not in drawn.replace("infinite", "")


def test_a_long_history_is_thinned_and_keeps_its_last_point() -> None:
    data = Trend(metric="m", unit="", arms={"fault": points(*range(5000))})
    drawn = str(trend(data, "a", []))
    line = next(one for one in ElementTree.fromstring(drawn).iter() if one.get("class") == "line").get("d") or ""
    assert line.count("L") < MOST
    assert len(drawn) < 60_000


def test_bars_tell_a_full_pass_from_a_partial_one() -> None:
    assert classes(str(sparkline([1.0, 0.5, 0.0])))[1:] == ["rate-all", "rate-some", "rate-some"]
    assert str(sparkline([])) == ""
