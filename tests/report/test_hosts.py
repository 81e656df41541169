"""The table of hosts: whose clock was off by how much, and who was lost."""

from __future__ import annotations

from pathlib import Path

from dtprobe.report import html
from dtprobe.report.hosts import table
from dtprobe.report.load import RunFolder
from dtprobe.report.markdown import render
from dtprobe.report.page import build


def host(**changes):
    return {
        "node": 1,
        "ranks": [2, 3],
        "address": "",
        "offset_ns": 0,
        "uncertainty_ns": 12_000,
        "stepped": False,
        "lost": None,
    } | changes


def folder(tmp_path: Path, **by_arm) -> RunFolder:
    runs = [
        {"arm": arm, "repeat": repeat, "probed": True, "ranks": [], "hosts": {"reference": "here", "hosts": {"node1": one}}}
        for arm, hosts in by_arm.items()
        for repeat, one in enumerate(hosts)
    ]
    return RunFolder(path=tmp_path, run={"arms": {arm: {} for arm in by_arm}, "arm_runs": runs}, verdict=None)


def test_a_wrong_clock_and_a_lost_host_are_told_arm_by_arm(tmp_path):
    made = folder(
        tmp_path,
        control=[host(offset_ns=-4_000)],
        fault=[host(), host(offset_ns=-30_000_000_000)],
        mitigated=[host(), host(lost="nothing came from it for 10 s")],
    )
    ((name, control, fault, mitigated),) = table(made).rows
    assert name == "node1, ranks 2, 3"
    assert control.startswith("equal within 12")
    assert fault.startswith("30 s ahead, within 12")
    assert mitigated == "lost in 1 of 2 runs: nothing came from it for 10 s"
    assert "30 s ahead" in render(build(made))
    assert "Against the clock of here" in html.render(build(made))


def test_runs_on_one_host_have_no_table_and_hostile_entries_do_no_harm(tmp_path):
    assert table(folder(tmp_path)) is None
    made = RunFolder(
        path=tmp_path,
        run={"arm_runs": [{"arm": "fault", "hosts": {"hosts": {"x": 3}}}, {"arm": "fault", "hosts": 7}]},
        verdict=None,
    )
    assert table(made) is None
    assert table(folder(tmp_path, fault=[host(offset_ns="x", ranks=None)])).rows
