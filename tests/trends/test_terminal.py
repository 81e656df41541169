"""Trends on a terminal and as JSON."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

from rich.console import Console

from dtprobe.trends.terminal import BARS, WIDTH, render_trends, spark, trends

sys.path.insert(0, str(Path(__file__).parent))
from simulated import DAY_NS, START_NS, InMemory

sys.path.pop(0)


def nights(count, value, host="h", torch=lambda number: "2.12.0"):
    common = {"scenario": "leak", "variant": "", "metric": "threads", "arm": "fault", "unit": "threads", "verdict": "partly"}
    return [
        {
            **common,
            "host": host,
            "torch": torch(at),
            "night": f"night-{at:02d}",
            "run": f"{at}-{host}",
            "value": value(at),
            "started_ns": START_NS + at * DAY_NS,
        }
        for at in range(count)
    ]


def shown(rows):
    console = Console(width=160, record=True, file=io.StringIO())
    render_trends(trends(InMemory(rows), "leak", None), console)
    return console.export_text()


def test_a_new_level_is_named_with_the_version_that_came_with_it():
    rows = nights(20, lambda at: 4.0 + (at >= 12), torch=lambda at: "2.12.0" if at < 12 else "2.13.0")
    text = shown(rows)
    assert "night-12 (torch 2.12.0 -> 2.13.0)" in text and "4 threads" in text and "5 threads" in text and "host" not in text
    (one,) = trends(InMemory(rows), "leak", "threads")
    data = json.loads(json.dumps(one.as_json()))
    assert data["changes"] == [12] and data["torch"][11:13] == ["2.12.0", "2.13.0"] and len(data["values"]) == 20


def test_hosts_are_apart():
    text = shown([*nights(5, lambda at: 4.0), *nights(5, lambda at: 9.0, host="other")])
    assert "other" in text and len(text.strip().splitlines()) == 3


def test_a_spark_has_the_last_values_between_the_lowest_bar_and_the_highest():
    assert spark([1, 2, 3])[0] == BARS[1] and spark([1, 2, 3])[-1] == BARS[-1]
    assert len(spark(list(range(100)))) == WIDTH and set(spark([5.0] * 4)) == {BARS[4]}
