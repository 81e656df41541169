"""Tracebacks within something else: which text is left of their lines, and whose they are."""

from __future__ import annotations

import json
from pathlib import Path

from dtprobe.diagnose.case import Artifact, Line
from dtprobe.diagnose.lines import read_lines

STACK = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "    g(x)", "LookupError: no such shard"]


def _lines(path: Path, text: str) -> list[Line]:
    path.write_text(text)
    return list(read_lines(Artifact(name=path.name, path=path, kind="text", size=path.stat().st_size)))


def test_a_loggers_prefix_is_taken_off_a_traceback_and_nothing_else(tmp_path):
    rows = [f"ERROR 05-05 10:00:0{at} [engine.py:7{at}] {one}" for at, one in enumerate(STACK)]
    lines = _lines(tmp_path / "a", "\n".join([*rows, "ERROR 05-05 10:00:09 [engine.py:88] shutting down"]))
    assert [one.text for one in lines[1:4]] == STACK[1:]
    assert lines[4].text.startswith("ERROR 05-05")


def test_a_tag_on_the_first_line_only_holds_to_the_end_of_its_traceback(tmp_path):
    text = "\n".join([f"[2025-05-05 10:00:00 TP2] Scheduler hit an exception: {STACK[0]}", *STACK[1:], "bye"])
    lines = _lines(tmp_path / "a", text)
    assert [one.rank for one in lines] == [2, 2, 2, 2, None]


def test_tagged_lines_of_one_rank_do_not_lend_their_rank_to_what_follows(tmp_path):
    lines = _lines(tmp_path / "a", "\n".join([*(f"[rank1]: {one}" for one in STACK), "LookupError: somebody else's"]))
    assert [one.rank for one in lines] == [1, 1, 1, 1, None]


def test_a_traceback_in_elastics_table_is_its_entrys(tmp_path):
    table = [
        "[0]:",
        "  time      : 2025-05-05_10:00:07",
        "  host      : c9",
        "  rank      : 5 (local_rank: 1)",
        "  exitcode  : 1 (pid: 31)",
        "  traceback : " + STACK[0],
        *("  " + one for one in STACK[1:]),
        "------------",
    ]
    lines = _lines(tmp_path / "a", "\n".join(table))
    inside = lines[5:9]
    assert [one.text for one in inside] == STACK
    assert {(one.rank, one.local_rank, one.host, one.t_ns) for one in inside} == {(5, 1, "c9", lines[1].t_ns)}
    assert lines[9].rank is None


def test_a_traceback_below_spawns_line_is_that_processs(tmp_path):
    lines = _lines(tmp_path / "a", "\n".join(["-- Process 3 terminated with the following error:", *STACK, "after"]))
    assert [one.local_rank for one in lines] == [None, 3, 3, 3, 3, None]


def test_an_error_file_is_its_traceback_at_its_time(tmp_path):
    written = {"message": {"message": STACK[-1], "extraInfo": {"py_callstack": "\n".join(STACK), "timestamp": "1746439207"}}}
    lines = _lines(tmp_path / "error.json", json.dumps(written))
    assert [one.text for one in lines[:4]] == STACK
    assert {(one.number, one.t_ns) for one in lines[:4]} == {(1, 1_746_439_207 * 10**9)}


def test_a_hostile_error_file_is_a_line_like_any_other(tmp_path):
    for text in (
        '{"message": {"py_callstack": 3}}',
        '{"message": "py_callstack"}',
        '{"message": {"extraInfo": {"py_callstack": ',
    ):
        assert [one.number for one in _lines(tmp_path / "error.json", text)] == [1]
