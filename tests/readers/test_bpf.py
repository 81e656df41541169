"""The bpf recorder's text."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtprobe.readers import perf
from dtprobe.readers.artifact import Problem, ReaderError
from dtprobe.readers.bpf import read_bpf


def test_events_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "rank1" / "bpf.txt"
    path.parent.mkdir()
    path.write_text(
        "1790000000.000000007 41 42 tracepoint:syscalls:sys_enter_futex gloo loop\n"
        "1790000000.5 41 41 uprobe:libc:malloc \nLost 12 events\n\n@calls[tracepoint:syscalls:sys_enter_futex]: 9000\n"
    )
    problems: list[Problem] = []
    traced = read_bpf(path, problems=problems)
    samples, counts = perf.SAMPLES.check(traced.samples), perf.COUNTS.check(traced.counts)
    assert samples["t_ns"].tolist() == [1_790_000_000_000_000_007, 1_790_000_000_500_000_000]
    assert samples[["pid", "tid", "event"]].values.tolist() == [
        [41, 42, "tracepoint:syscalls:sys_enter_futex"],
        [41, 41, "uprobe:libc:malloc"],
    ]
    assert samples["comm"].fillna("").tolist() == ["gloo loop", ""]
    assert counts[["event", "count", "rank"]].values.tolist() == [["tracepoint:syscalls:sys_enter_futex", 9000, 1]]
    assert [one.kind for one in problems] == ["noise"]


def test_other_text_is_one_clear_line_and_an_empty_file_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bpf.txt"
    path.write_text("hello\n")
    with pytest.raises(ReaderError, match="is not the bpf recorder's output"):
        read_bpf(path)
    path.write_text("")
    assert len(read_bpf(path).samples) == len(read_bpf(path).counts) == 0
