"""The timeline that Perfetto opens: the format's rules, ranks as processes, moments, operations, arrows of the waits."""

from __future__ import annotations

import json
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from dtprobe.diagnose.diagnosis import Diagnosis
from dtprobe.report.postmortem import trace


def _document(diagnosis: Diagnosis) -> dict[str, Any]:
    document = json.loads(trace.render(diagnosis))
    assert isinstance(document["traceEvents"], list)
    return document


@pytest.mark.parametrize("name", ["lost_gpu", "deadlock", "big", "undetermined", "healthy", "bare", "hostile"])
def test_every_event_has_what_its_phase_needs_and_every_arrow_begins_and_ends_in_a_slice(
    diagnoses: ModuleType, name: str
) -> None:
    events = _document(diagnoses.big(200) if name == "big" else diagnoses.ALL[name]())["traceEvents"]
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    slices = [event for event in events if event["ph"] == "X"]
    at: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in slices:
        at.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    ends: dict[int, str] = {}
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= set(event), event
        assert event["pid"] in named
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        elif event["ph"] == "i":
            assert event["s"] == "t"
        else:
            assert event["ph"] in ("s", "f"), event
            assert any(begin <= event["ts"] <= end for begin, end in at[event["pid"], event["tid"]]), event
            ends[event["id"]] = ends.get(event["id"], "") + event["ph"]
    assert set(ends.values()) <= {"sf"}


def test_ranks_are_processes_with_their_moments_operations_and_waits(diagnoses: ModuleType) -> None:
    document = _document(diagnoses.lost_gpu())
    events = document["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == [
        "host node-a",
        "host node-b",
        "rank 0 (node-a)",
        "rank 1 (node-a)",
        "rank 2 (node-b)",
        "rank 3 (node-b)",
    ]
    (xid,) = [event for event in events if event["ph"] == "i" and event["name"].startswith("Xid 79")]
    assert (names[xid["pid"]], xid["ts"], xid["args"]["line"]) == ("rank 3 (node-b)", 40e6, 8812)
    assert document["otherData"]["zero_utc_ns"] == diagnoses.T0 - 40 * 10**9
    stuck = [event for event in events if event["name"] == "all_reduce (never completed)"]
    assert sorted(names[event["pid"]] for event in stuck) == ["rank 0 (node-a)", "rank 1 (node-a)", "rank 2 (node-b)"]
    arrows = {(event["ph"], names[event["pid"]]) for event in events if event["ph"] in "sf"}
    assert arrows == {("s", "rank 0 (node-a)"), ("s", "rank 1 (node-a)"), ("s", "rank 2 (node-b)"), ("f", "rank 3 (node-b)")}


def test_where_nothing_has_a_time_moments_keep_their_order_and_the_head_says_so(diagnoses: ModuleType) -> None:
    made = diagnoses.lost_gpu()
    made = replace(made, operations=(), timeline=tuple(replace(one, t_ns=None) for one in made.timeline))
    document = _document(made)
    times = [event["ts"] for event in document["traceEvents"] if event["ph"] == "i"]
    assert times == sorted(times) and len(set(times)) == len(times)
    assert "no moment has a time" in document["otherData"]["zero"]


def test_arrows_are_bounded_and_those_left_out_counted(diagnoses: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "ARROWS", 10)
    document = _document(diagnoses.big(64))
    assert sum(event["ph"] == "s" for event in document["traceEvents"]) == 10
    assert document["otherData"]["waits_without_arrow"] == 54
