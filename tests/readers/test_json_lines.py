"""proc, events and logs: the artifacts of our own recorders and workers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest

from dtprobe.readers import events, logs, proc
from dtprobe.readers.artifact import Problem, ReaderError
from dtprobe.worker import record


def test_what_a_worker_records_is_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "rank1"
    folder.mkdir()
    environ = {"DTPROBE_RANK_FOLDER": str(folder), "RANK": "1"}
    record("step", environ=environ, name="loss", value=2.5, step=3)
    record("step", environ=environ, value=math.nan)
    record("note", environ=environ, text="caf\u00e9 \ud800")
    frame = events.SCHEMA.check(events.read_events(folder / "events.jsonl"))
    assert frame["kind"].tolist() == ["step", "step", "note"]
    assert frame["name"].fillna("").tolist() == ["loss", "", ""]
    assert frame["value"][0] == 2.5 and math.isnan(frame["value"].array._data[1]) and pd.isna(frame["value"][2])
    assert json.loads(frame["fields"][0]) == {"name": "loss", "value": 2.5, "step": 3}
    assert json.loads(frame["fields"][2]) == {"text": "caf\u00e9 \ud800"}
    assert set(frame["rank"]) == {1} and frame["t_ns"].is_monotonic_increasing and frame["tid"].notna().all()


def test_a_line_cut_by_the_workers_end_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"t_ns": 5, "kind": "a", "rank": 0}\n{"t_ns": 6, "ki')
    problems: list[Problem] = []
    frame = events.read_events(path, problems=problems)
    assert frame["t_ns"].tolist() == [5] and [(one.kind, one.text) for one in problems] == [("cut", "line 2, the last, is cut")]
    path.write_text('{"kind": 3, "t_ns": "x", "value": "y", "pid": 1e400}\nlog text\n[1]\n')
    frame = events.SCHEMA.check(events.read_events(path, problems=problems))
    assert frame[["kind", "t_ns", "value", "pid"]].isna().all(axis=None)
    assert problems[-1].text == "2 of 4 lines are not JSON objects, the first is line 2"


def test_samples_of_proc(tmp_path: Path) -> None:
    path = tmp_path / "rank2" / "proc.jsonl"
    path.parent.mkdir()
    rows = [
        {
            "t_ns": 1,
            "pid": 7,
            "rank": 2,
            "threads": 5,
            "state": "S",
            "wchan": "futex_wait_queue",
            "cpu_user_s": 1,
            "thread_names": {"gloo": 4},
        },
        {"t_ns": 2, "pid": 7, "threads": -1 << 70, "maps": 30, "wchan": "", "state": None},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    frame = proc.SCHEMA.check(proc.read_proc(path))
    assert frame["rank"].tolist() == [2, 2] and set(frame["kind"]) == {"sample"}
    assert frame["threads"].fillna(-9).tolist() == [5, -9]
    assert frame["maps"].isna().tolist() == [True, False]
    assert frame["cpu_user_s"][0] == 1.0 and json.loads(frame["thread_names"][0]) == {"gloo": 4}
    assert frame["wchan"].isna().tolist() == [False, True] and pd.isna(frame["state"][1])


@pytest.mark.parametrize("read", [proc.read_proc, events.read_events])
def test_other_text_is_one_clear_line(tmp_path: Path, read: object) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\x00\xff\n" * 3 + b"[" * 100_000)
    with pytest.raises(ReaderError, match="is not JSON lines"):
        read(path)  # type: ignore[operator]


def test_lines_of_a_log_with_the_times_at_which_it_grew(tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()
    path = tmp_path / "rank0" / "stderr.log"
    path.write_bytes(b"one\n\x1b[31mtwo\x1b[0m\r\n 10%\r 20%\r100%\nb\xffd\n\nlast")
    times = [("stderr", 4, 100), ("stdout", 999, 150), ("stderr", 12, 200), ("stderr", 38, 300)]
    text = "".join(json.dumps({"t_ns": at, "stream": stream, "size": size}) + "\n" for stream, size, at in times)
    path.with_name("log-times.jsonl").write_text(text)
    frame = logs.SCHEMA.check(logs.read_logs(path))
    assert frame["text"].tolist() == ["one", "two", "100%", "b\ufffdd", "", "last"]
    assert frame["line"].tolist() == [1, 2, 3, 4, 5, 6]
    assert frame["t_ns"].fillna(0).tolist() == [100, 300, 300, 300, 300, 0]
    assert set(frame["kind"]) == {"stderr"} and set(frame["rank"]) == {0}


def test_a_log_without_recorder_or_with_a_broken_record_has_no_times(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_text("a\nb\n")
    assert logs.read_logs(path)["t_ns"].isna().all()
    path.with_name("log-times.jsonl").write_text("no\n")
    problems: list[Problem] = []
    frame = logs.read_logs(path, problems=problems)
    assert (
        frame["t_ns"].isna().all() and frame["text"].tolist() == ["a", "b"] and [one.kind for one in problems] == ["unreadable"]
    )
    path.write_text("")
    assert len(logs.SCHEMA.check(logs.read_logs(path, problems=problems))) == 0


def test_of_a_huge_log_the_beginning_is_read_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LIMIT", 10)
    path = tmp_path / "stdout.log"
    path.write_text("0123\n5678\nabcd\n")
    problems: list[Problem] = []
    assert logs.read_logs(path, problems=problems)["text"].tolist() == ["0123", "5678"]
    assert [(one.kind, one.text) for one in problems] == [("cut", "only the first 10 bytes were read")]
