"""Which measures a report draws over time, and what their lines hold."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from dtprobe.report.load import load
from dtprobe.report.series import GRID, fault_windows, growth


def test_measures_that_differ_between_the_arms_are_drawn_and_the_others_named(tmp_path: Path, samples: ModuleType) -> None:
    found = growth(load(samples.leak(tmp_path)))
    drawn = [panel.name for panel in found.panels]
    assert {"threads", "fds", "sockets"} <= set(drawn)
    assert "pipes" in found.unchanged
    assert not {"pipes", "rss_bytes"} & set(drawn)


def test_a_line_is_the_median_of_the_traces_and_its_band_what_they_span(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "spread")
    for repeat, threads in enumerate((10, 20, 60)):
        for arm in ("control", "fault"):
            run = made.arm_run(arm, repeat, at_s=repeat * 10, wall_s=[4.0], exits=[0])
            for step in range(41):
                made.row("proc", run, 0, step / 10, "proc.jsonl", kind="sample", threads=threads if arm == "fault" else 5)
    panel = next(panel for panel in growth(load(made.write())).panels if panel.name == "threads")
    fault = panel.lines[panel.lines["arm"] == "fault"]
    assert len(fault) == GRID
    assert set(fault["low"]) == {10.0} and set(fault["mid"]) == {20.0} and set(fault["high"]) == {60.0}
    assert panel.last == {"control": 5.0, "fault": 20.0}
    assert panel.summary == "Threads: control from 5 to 5; fault from 20 to 20."


def test_processor_time_is_drawn_as_a_share_of_one_core(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "spin")
    for arm, share in (("control", 0.1), ("fault", 1.0)):
        run = made.arm_run(arm, 0, at_s=0, wall_s=[10.0], exits=[0])
        for step in range(201):
            made.row("proc", run, 0, step / 20, "proc.jsonl", kind="sample", cpu_user_s=step / 20 * share, cpu_system_s=0.0)
    (panel,) = growth(load(made.write())).panels
    assert panel.name == "cpu_percent"
    assert panel.last == pytest.approx({"control": 10.0, "fault": 100.0}, rel=0.02)


def test_a_line_ends_where_most_traces_ended(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "ends")
    for repeat, wall in enumerate((2.0, 2.0, 8.0)):
        run = made.arm_run("fault", repeat, at_s=repeat * 10, wall_s=[wall], exits=[0])
        for step in range(int(wall * 20) + 1):
            made.row("proc", run, 0, step / 20, "proc.jsonl", kind="sample", threads=1 + step)
    panel = next(panel for panel in growth(load(made.write())).panels if panel.name == "threads")
    assert panel.lines["t_s"].max() == pytest.approx(2.0, abs=0.2)


def test_values_that_the_worker_reports_become_a_panel_of_their_own(tmp_path: Path, samples: ModuleType) -> None:
    found = growth(load(samples.leak(tmp_path)))
    reported = [panel for panel in found.panels if panel.name.startswith("event-")]
    assert [panel.title for panel in reported] == ["Threads, as the worker reports it"]
    assert reported[0].last["fault"] == 62


def test_the_fault_is_in_place_between_its_events_or_to_the_end(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "window")
    run = made.arm_run("fault", 2, at_s=100, wall_s=[8.0], exits=[0])
    for rank in range(2):
        made.row("events", run, rank, 2.0, "events.jsonl", kind="fault_begin", name="stop")
        made.row("events", run, rank, 5.0, "events.jsonl", kind="fault_end", name="stop")
    made.row("events", run, 0, 6.0, "events.jsonl", kind="fault_begin")
    windows = fault_windows(load(made.write()))
    assert [(window.text, window.begin_s, window.end_s) for window in windows] == [("stop", 2.0, 5.0), ("fault", 6.0, 8.0)]


def test_injections_of_the_run_are_windows_too(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "window")
    run = made.arm_run("fault", 2, at_s=0, wall_s=[8.0], exits=[0])
    begin = run["started_ns"] + 3 * samples.SECOND
    made.run["injections"] = [
        {"arm": "fault", "repeat": 2, "fault": "process:stop,rank=1", "begin_ns": begin, "end_ns": begin + samples.SECOND},
        {"arm": "fault", "repeat": 1, "fault": "another repeat", "begin_ns": begin},
        {"arm": "control", "repeat": 2, "fault": "an arm that did not run", "begin_ns": begin},
        "noise",
    ]
    (window,) = fault_windows(load(made.write()))
    assert (window.arm, window.text, window.begin_s, window.end_s) == ("fault", "process:stop,rank=1", 3.0, 4.0)
