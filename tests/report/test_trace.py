"""The trace that Perfetto opens: the format's rules, every source of events, bounds."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dtprobe.report import trace
from dtprobe.report.load import load


def _events(folder: Path) -> list[dict[str, Any]]:
    document = json.loads(trace.write(load(folder), folder / "trace.json").read_text(encoding="utf-8"))
    assert isinstance(document["traceEvents"], list)
    return document["traceEvents"]


@pytest.mark.parametrize(
    "name", ["leak", "skipped", "unsupported", "inconclusive", "error", "injection", "unfinished", "hostile"]
)
def test_every_event_has_what_its_phase_needs(tmp_path: Path, samples: ModuleType, name: str) -> None:
    for event in _events(samples.SAMPLES[name](tmp_path)):
        assert {"ph", "pid", "tid", "name"} <= set(event), event
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        elif event["ph"] == "i":
            assert event["s"] in ("t", "p")
        else:
            assert event["ph"] in ("B", "C"), event


def test_each_rank_of_an_arm_run_is_a_process_with_its_collectives(tmp_path: Path, samples: ModuleType) -> None:
    events = _events(samples.skipped(tmp_path))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(names) == 3 * 3 * 4
    (pid,) = [pid for pid, name in names.items() if name == "fault/2 rank 0"]
    mine = [event for event in events if event["pid"] == pid and event.get("cat") == "collective"]
    assert len(mine) == 5
    assert mine[-1]["name"] == "all_reduce (never completed)"
    assert mine[-1]["ts"] == pytest.approx(3_000_000)
    assert mine[-1]["args"]["call_site"] == "worker.py:44 step"
    assert [event["args"]["reason"] for event in events if event["name"] == "hang suspected"] == [
        "no rank finished a collective for 2.0 s; rank 1 is one behind"
    ] * 3


def test_system_calls_counters_and_spans_of_the_worker_are_in_it(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "all")
    run = made.arm_run("fault", 2, at_s=0, wall_s=[5.0], exits=[0])
    made.row(
        "syscalls", run, 0, 1.0, "strace.txt", tid=77, kind="syscall", name="futex", args="...", result="0", duration_s=0.5
    )
    made.row("syscalls", run, 0, 1.1, "strace.txt", tid=77, kind="signal", name="SIGTERM")
    made.row("proc", run, 0, 1.0, "proc.jsonl", kind="sample", threads=5, rss_bytes=1 << 30)
    made.row("events", run, 0, 3.0, "events.jsonl", kind="step", fields='{"duration_s": 0.25, "loss": NaN}')
    zero = run["started_ns"]
    made.row(
        "gpu_ops",
        run,
        0,
        1.0,
        "gpu",
        kind="kernel",
        name="ncclKernel",
        start_ns=zero + 10**9,
        end_ns=zero + 2 * 10**9,
        device=0,
        stream=7,
    )
    events = _events(made.write())
    found = {event["name"]: event for event in events if event["ph"] in "XiC"}
    assert (found["futex"]["ts"], found["futex"]["dur"]) == (1e6, 5e5)
    assert found["SIGTERM"]["ph"] == "i"
    assert found["threads"]["args"] == {"threads": 5}
    assert (found["step"]["ts"], found["step"]["dur"], found["step"]["args"]["loss"]) == (2.75e6, 2.5e5, "nan")
    assert (found["ncclKernel"]["ts"], found["ncclKernel"]["dur"]) == (1e6, 1e6)
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"system calls of thread 77", "GPU stream 7", "reported by the worker"} <= threads


def test_faults_that_fired_are_on_the_life_of_the_first_process_and_a_launchers_ranks_have_their_own(
    tmp_path: Path, samples: ModuleType
) -> None:
    events = _events(samples.injection(tmp_path))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["fault/0 command", "fault/0 rank 0", "fault/0 rank 1"]
    faults = [
        (names[event["pid"]], event["ph"], event["ts"], event.get("dur")) for event in events if event.get("cat") == "fault"
    ]
    assert faults == [("fault/0 command", "X", 4e6, 1e6), ("fault/0 command", "i", 7e6, None)]


def test_a_counter_is_written_when_it_changes(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "steady")
    run = made.arm_run("fault", 2, at_s=0, wall_s=[5.0], exits=[0])
    for step in range(100):
        made.row("proc", run, 0, step / 20, "proc.jsonl", kind="sample", threads=5 if step < 60 else 6)
    counters = [(event["ts"], event["args"]["threads"]) for event in _events(made.write()) if event["ph"] == "C"]
    assert counters == [(0, 5), (3e6, 6)]


def test_of_too_many_calls_the_longest_and_the_failed_are_kept(
    tmp_path: Path, samples: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "CALLS", 3)
    made = samples.Made(tmp_path, "many")
    run = made.arm_run("fault", 2, at_s=0, wall_s=[5.0], exits=[0])
    for step in range(50):
        made.row(
            "syscalls",
            run,
            0,
            step / 100,
            "strace.txt",
            kind="syscall",
            name=f"call{step}",
            duration_s=step / 1e6,
            errno="EAGAIN" if step == 4 else None,
        )
    calls = [event["name"] for event in _events(made.write()) if event.get("cat") == "syscall"]
    assert calls == ["call4", "call48", "call49"]
