"""perf script and perf stat, recorded in each form."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtprobe.readers.artifact import Problem, ReaderError
from dtprobe.readers.perf import COUNTS, SAMPLES, read_perf_script, read_perf_stat

CORPUS = Path(__file__).parents[1] / "corpus" / "perf"


def test_samples_with_stacks_and_with_all_fields_are_the_same() -> None:
    problems: list[Problem] = []
    few = SAMPLES.check(read_perf_script(CORPUS / "few.script.txt", problems=problems))
    full = SAMPLES.check(read_perf_script(CORPUS / "fields.script.txt", problems=problems))
    assert problems == []
    assert len(few) == len(full) > 4
    for name in ("tid", "comm", "cpu", "event", "text"):
        assert few[name].tolist() == full[name].tolist(), name
    assert set(few["event"]) == {"syscalls:sys_enter_futex"} and few["text"].str.contains("uaddr: 0x").all()
    assert few["pid"].isna().all() and full["pid"].nunique() == 1 and full["tid"].nunique() == 2
    assert few["t_ns"].isna().all() and (few["clock_s"] - full["clock_s"]).abs().max() < 1e-5
    assert few["frames"][0].split(";")[0] == "__pthread_once_slow (/usr/lib/x86_64-linux-gnu/libc.so.6)"
    assert full["frames"].isna().all()


def test_the_real_time_clock_gives_times_and_so_does_a_told_offset() -> None:
    frame = read_perf_script(CORPUS / "realtime.script.txt")
    assert (frame["t_ns"] > 1_700_000_000 * 10**9).all() and frame["t_ns"].is_monotonic_increasing
    assert frame["frames"].notna().all() and frame["text"].isna().all()
    assert set(frame["period"]) == {5_000_000}
    told = read_perf_script(CORPUS / "fields.script.txt", clock_offset_ns=10**18)
    assert (told["t_ns"] - 10**18 - told["clock_s"] * 1e9).abs().max() < 1000


@pytest.mark.parametrize("name", ["people.stat.txt", "commas.stat.csv", "lines.stat.json"])
def test_counts_of_each_form(name: str) -> None:
    problems: list[Problem] = []
    frame = COUNTS.check(read_perf_stat(CORPUS / name, problems=problems))
    assert problems == []
    counts = frame[frame["kind"] == "count"].set_index("event")
    assert list(counts.index) == ["task-clock", "context-switches", "page-faults", "cycles"]
    assert counts["count"].notna().tolist() == [False, True, True, False]
    assert counts["unit"].fillna("").tolist() == ["msec", "", "", ""]
    assert counts["value"].notna().tolist() == [True, True, True, False]
    assert 500 < counts["count"]["page-faults"] < 2000
    times = frame[frame["kind"] == "time"]["event"].tolist()
    assert times == (["time elapsed", "user", "sys"] if name.startswith("people") else [])


def test_counts_over_intervals_and_processors() -> None:
    frame = read_perf_stat(CORPUS / "intervals.stat.txt")
    assert frame["count"].notna().tolist() == [True, False, True]
    assert frame["since_start_s"].is_monotonic_increasing and frame["since_start_s"].between(0.04, 1).all()
    frame = read_perf_stat(CORPUS / "processors.stat.csv")
    assert frame["of"].tolist() == ["CPU0", "CPU1"] and (frame["running"] == 1).all()


def test_thousands_repeats_and_shares_of_the_form_for_people(tmp_path: Path) -> None:
    path = tmp_path / "rank1" / "perf.stat.txt"
    path.parent.mkdir()
    path.write_text(
        "         1,234,567      syscalls:sys_enter_futex:u       #    1.2 K/sec    ( +-  0.10% )  (33.40%)\n"
        "   python-4321              12      minor-faults\n       0.5 +- 0.1 seconds time elapsed  ( +-  0.10% )\nSegmentation fault\n"
    )
    problems: list[Problem] = []
    frame = read_perf_stat(path, problems=problems)
    assert frame["event"].tolist() == ["syscalls:sys_enter_futex:u", "minor-faults", "time elapsed"]
    assert frame["count"].fillna(-1).tolist() == [1234567, 12, -1]
    assert frame["running"].fillna(-1).round(6).tolist() == [0.334, -1, -1]
    assert frame["of"].fillna("").tolist() == ["", "python-4321", ""]
    assert set(frame["rank"]) == {1} and [one.kind for one in problems] == ["noise"]


@pytest.mark.parametrize("read", [read_perf_script, read_perf_stat])
def test_other_text_is_one_clear_line(tmp_path: Path, read: object) -> None:
    path = tmp_path / "perf.txt"
    path.write_text("hello\nworld\n")
    with pytest.raises(ReaderError, match="is not perf"):
        read(path)  # type: ignore[operator]


def test_an_empty_script_is_no_sample(tmp_path: Path) -> None:
    path = tmp_path / "perf.script.txt"
    path.write_text("")
    assert len(SAMPLES.check(read_perf_script(path))) == 0
