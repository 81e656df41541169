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


def test_injections_that_fired_are_spans_or_moments(tmp_path: Path, samples: ModuleType) -> None:
    windows = fault_windows(load(samples.injection(tmp_path)))
    assert [(window.text, window.begin_s, window.end_s) for window in windows] == [
        ("collective:delay,rank=1,nth=3,seconds=1", 4.0, 5.0),
        ("process:kill,rank=0,after_s=7", 7.0, 7.0),
    ]


def test_repeats_are_laid_over_each_other_where_their_work_begins(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "late")
    for repeat, start_up_s in enumerate((2.0, 5.0, 9.0)):
        run = made.arm_run("fault", repeat, at_s=repeat * 30, wall_s=[start_up_s + 4], exits=[1])
        made.row("events", run, 0, start_up_s, "events.jsonl", kind="ready")
        if repeat == 2:
            made.row("events", run, 0, start_up_s + 1, "events.jsonl", kind="fault_begin")
        for step in range(int(20 * (start_up_s + 4))):
            leaked = max(0, step - 20 * (start_up_s + 2)) > 0
            made.row("proc", run, 0, step / 20, "proc.jsonl", kind="sample", threads=50 if leaked else 5)
    found = growth(load(made.write()))
    panel = next(panel for panel in found.panels if panel.name == "threads")
    assert found.aligned
    assert set(panel.lines["low"]) == set(panel.lines["mid"]) == set(panel.lines["high"]) == {5.0, 50.0}
    assert panel.lines["t_s"].min() >= -0.15 * 4
    (window,) = panel.windows
    assert (window.begin_s, window.end_s) == (1.0, 4.0)


def test_how_a_rank_takes_itself_apart_is_not_drawn(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "end")
    for arm in ("control", "fault"):
        run = made.arm_run(arm, 0, at_s=0, wall_s=[6.0], exits=[0])
        for at_s in (0.0, 3.0):
            made.row("events", run, 0, at_s, "events.jsonl", kind="step")
        for step in range(120):
            ending = step / 20 > 3
            made.row(
                "proc",
                run,
                0,
                step / 20,
                "proc.jsonl",
                kind="sample",
                threads=30 if arm == "fault" and not ending else 1 if ending else 10,
            )
        made.row("proc", run, 0, 6.0, "proc.jsonl", kind="sample", threads=1, rss_bytes=0)
    panel = next(panel for panel in growth(load(made.write())).panels if panel.name == "threads")
    assert panel.last == {"control": 10.0, "fault": 30.0}


def test_arms_that_differ_only_by_noise_give_no_panel(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "noise")
    for arm in ("control", "fault"):
        run = made.arm_run(arm, 0, at_s=0, wall_s=[3.0], exits=[0])
        for step in range(60):
            made.row(
                "proc",
                run,
                0,
                step / 20,
                "proc.jsonl",
                kind="sample",
                threads=5 + (arm == "fault"),
                fds=20 + 2 * (arm == "fault"),
                maps=400,
            )
    found = growth(load(made.write()))
    assert found.panels == ()
    assert found.unchanged == ("threads", "open descriptors", "memory mappings")
