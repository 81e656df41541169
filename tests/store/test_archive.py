"""The history: nothing lost by any number of writers, damage named and passed over, folding that changes no answer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from dtprobe.store import History, history
from dtprobe.store.rows import COLUMNS, LATER, rows_of

START = 1_750_000_000_000_000_000


def rows(number: int, **more: Any) -> list[dict[str, Any]]:
    run = {
        "id": f"run-{number:05d}",
        "scenario": "leak",
        "variant": "",
        "failure_mode": "gloo-thread-leak",
        "started_ns": START + number,
    }
    run |= {"machine": {"host": "h", "python": "3.11.7"}, "git": {"commit": "abc", "dirty": False}, "seed": number}
    verdict = {"verdict": "partly", "expected": "partly", "as_expected": True, "mitigation": "held", "torch": "2.13.0"}
    metric = {
        "control": 5.0,
        "fault": 8.0 + number,
        "mitigated": None,
        "unit": "threads",
        "intervals": {"control": [4.0, 6.0]},
        "n": {"control": 3},
    }
    return rows_of(run, verdict | {"metrics": {"threads": metric}} | more)


def filled(folder: Path, count: int) -> History:
    made = History(folder / "history")
    for number in range(count):
        made.append(rows(number))
    return made


def test_a_run_is_one_row_a_metric_and_arm_that_was_measured(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    frame = history(tmp_path).frame()
    assert list(frame.columns) == list(COLUMNS)
    control, fault = frame.to_dict("records")
    assert (control["arm"], control["value"], control["low"], control["high"], control["n"]) == ("control", 5.0, 4.0, 6.0, 3)
    assert (fault["arm"], fault["value"], pd.isna(fault["low"]), pd.isna(fault["n"])) == ("fault", 8.0, True, True)
    assert (control["git"], control["host"], control["python"], control["seed"], control["unit"]) == (
        "abc",
        "h",
        "3.11.7",
        0,
        "threads",
    )


def test_a_run_without_metrics_is_in_the_history_too(tmp_path: Path) -> None:
    History(tmp_path / "history").append(rows(0, verdict="unsupported", metrics={}))
    reading = history(tmp_path)
    assert reading.frame()["verdict"].tolist() == ["unsupported"]
    assert reading.overview()["runs"].tolist() == [1]


def test_the_same_run_entered_twice_counts_once(tmp_path: Path) -> None:
    made = filled(tmp_path, 2)
    made.append(rows(1))
    assert len(made.read().frame()) == 4


def test_an_absent_history_is_an_empty_one(tmp_path: Path) -> None:
    reading = history(tmp_path / "nowhere")
    assert reading.frame().empty
    assert reading.overview().empty
    assert reading.broken == ()


def test_the_overview_tells_the_last_verdict_of_each_scenario_and_torch(tmp_path: Path) -> None:
    made = filled(tmp_path, 3)
    made.append(rows(3, verdict="refuted", as_expected=False))
    made.append(rows(4, torch="2.14.0"))
    first, second = made.read().overview().to_dict("records")
    assert (first["torch"], first["runs"], first["as_expected"], first["last_verdict"]) == ("2.13.0", 4, 3, "refuted")
    assert not first["last_as_expected"]
    assert first["last_run"] == "run-00003"
    assert (second["torch"], second["runs"], second["last_verdict"]) == ("2.14.0", 1, "partly")


def test_queries_take_parameters(tmp_path: Path) -> None:
    reading = filled(tmp_path, 3).read()
    answer = reading.sql("SELECT value FROM history WHERE arm = ? AND seed > ? ORDER BY value", ["fault", 0])
    assert answer["value"].tolist() == [9.0, 10.0]


def test_a_folder_whose_name_is_a_pattern_is_read_as_it_is_called(tmp_path: Path) -> None:
    odd = tmp_path / "runs[1]*?'x"
    filled(odd, 2)
    assert len(history(odd).frame()) == 4
    shutil.rmtree(odd)
    assert history(odd).frame().empty


def damage_footer(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def damage_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396
    path.write_bytes(bytes(data))


def make_foreign(path: Path) -> None:
    pd.DataFrame({"run": ["x"], "other": [1]}).to_parquet(path)


def make_mistyped(path: Path) -> None:
    frame = pd.read_parquet(path)
    frame["started_ns"] = "yesterday"
    frame.to_parquet(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage", [damage_footer, damage_page, make_foreign, make_mistyped, make_folder, lambda path: path.write_bytes(b"")]
)
@pytest.mark.parametrize("fold_first", [False, True])
def test_a_broken_file_is_named_and_the_rest_is_read_and_folded(tmp_path: Path, damage: Any, fold_first: bool) -> None:
    made = filled(tmp_path, 4)
    if fold_first:
        made.fold(lambda: START)
        for number in (4, 5):
            made.append(rows(number))
    victim = tmp_path / "history" / made.files()[-1]
    damage(victim)
    reading = made.read()
    assert [broken.path for broken in reading.broken] == [str(victim)]
    assert reading.broken[0].reason
    sound = 10 if fold_first else 6
    assert len(reading.frame()) == sound
    made.fold(lambda: START)
    assert victim.exists()
    again = made.read()
    assert len(again.frame()) == sound
    assert [broken.path for broken in again.broken] == [str(victim)]


def test_folding_keeps_every_row_and_leaves_one_file(tmp_path: Path) -> None:
    made = filled(tmp_path, 7)
    before = made.read().frame()
    block = made.fold(lambda: START)
    assert made.files() == [block]
    pd.testing.assert_frame_equal(made.read().frame(), before)
    for number in range(7, 9):
        made.append(rows(number))
    made.fold(lambda: START)
    assert len(made.files()) == 1
    assert len(made.read().frame()) == 18


def test_a_fold_killed_between_writing_and_removing_counts_nothing_twice(tmp_path: Path) -> None:
    made = filled(tmp_path, 3)
    shutil.copytree(tmp_path / "history", tmp_path / "kept")
    before = made.read().frame()
    made.fold(lambda: START)
    for path in (tmp_path / "kept").glob("*.parquet"):
        shutil.copy(path, tmp_path / "history")
    assert len(made.files()) == 4
    pd.testing.assert_frame_equal(made.read().frame(), before)
    made.fold(lambda: START)
    pd.testing.assert_frame_equal(made.read().frame(), before)


def test_folding_comes_by_itself_and_leaves_full_blocks_alone(tmp_path: Path) -> None:
    made = History(tmp_path / "history", fold_at=5, block_rows=10)
    for number in range(12):
        made.append(rows(number))
        made.fold_if_due(lambda: START)
    assert [name.startswith("block-") for name in made.files()] == [True, True, False, False]
    assert len(made.read().frame()) == 24


def test_temporary_files_of_dead_writers_are_removed_when_old_only(tmp_path: Path) -> None:
    made = filled(tmp_path, 1)
    left = tmp_path / "history" / ".run.parquet.1234.tmp"
    left.write_bytes(b"PAR1")
    now = left.stat().st_mtime_ns
    made.fold(lambda: now + 60 * 10**9)
    assert left.exists()
    made.fold(lambda: now + 7200 * 10**9)
    assert not left.exists()
    assert len(made.read().frame()) == 2


WRITER = """
import sys
from pathlib import Path
from dtprobe.store import History
made = History(Path(sys.argv[1]), fold_at=7)
for number in range(60):
    made.append([{"run": f"{sys.argv[2]}-{number}", "scenario": "s", "started_ns": number, "metric": "m", "arm": arm, "value": number} for arm in ("control", "fault")])
    made.fold_if_due(lambda: 0)
"""


def test_writers_that_fold_at_the_same_time_lose_nothing_and_a_reader_sees_no_gap(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    writers = [subprocess.Popen((sys.executable, "-c", WRITER, str(folder), name)) for name in ("a", "b")]
    seen = [0]
    try:
        while any(writer.poll() is None for writer in writers):
            reading = History(folder).read()
            assert reading.broken == ()
            counts = reading.sql("SELECT count(*) AS n FROM history GROUP BY run")["n"]
            assert set(counts) <= {2}, "a run is seen whole or not at all, and once"
            seen.append(len(counts))
    finally:
        for writer in writers:
            writer.wait(60)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen == sorted(seen), "what was there once stays"
    assert len(History(folder).read().sql("SELECT DISTINCT run FROM history")) == 120


def test_files_of_an_earlier_version_are_read_with_nulls_for_what_they_lack(tmp_path: Path) -> None:
    made = filled(tmp_path, 3)
    for path in sorted((tmp_path / "history").glob("*.parquet"))[:2]:
        pq.write_table(pq.read_table(path).drop_columns(list(LATER)), path)
    newest = rows(2)
    for row in newest:
        row["night"], row["took_s"] = "a-night", 12.5
    made.append(newest)
    reading = history(tmp_path)
    assert reading.broken == ()
    shown = reading.sql("SELECT DISTINCT run, night, took_s FROM history ORDER BY run")
    assert shown["night"].isna().tolist() == [True, True, False] and shown["took_s"].tolist()[2] == 12.5


def test_what_recorders_cost_is_a_metric(tmp_path: Path) -> None:
    cost = {"proc + logs": {"ratio": 1.05, "low": 1.0, "high": 1.1, "n": 2}}
    History(tmp_path / "history").append(rows(0, overhead=cost))
    shown = history(tmp_path).sql("SELECT value, high, n, unit, arm FROM history WHERE metric = 'cost proc + logs'")
    assert shown.to_dict("records") == [{"value": 1.05, "high": 1.1, "n": 2, "unit": "ratio", "arm": "control"}]


FULL = """
import os, subprocess, sys
from pathlib import Path
from dtprobe.errors import DtprobeError
from dtprobe.store import History
from dtprobe.store.merge import merge
sys.path.insert(0, sys.argv[2])
from test_archive import rows
out = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(out)], check=True)
made = History(out / "history")
for number in range(30):
    made.append(rows(number))
def refused(what, action):
    try:
        action()
        print(what, "was done")
    except DtprobeError as error:
        print(what, error)
    print(what + "-KEPT", made.read().sql("SELECT count(DISTINCT run) AS n FROM history")["n"][0], len(made.read().broken))
with (out / "filling").open("wb", buffering=0) as file:
    while True:
        try:
            file.write(b"x" * 4096)
        except OSError:
            break
refused("APPEND", lambda: made.append(rows(99)))
refused("FOLD", lambda: made.fold(lambda: 0))
refused("MERGE", lambda: merge([sys.argv[3]], out=out))
print("LEFT", len(list((out / "history").glob("*.parquet"))), len(list((out / "history").glob(".*.tmp"))), [path.name for path in out.iterdir() if path.is_dir()])
(out / "filling").unlink()
made.append(rows(99))
made.fold(lambda: 0)
print("AFTER", made.read().sql("SELECT count(DISTINCT run) AS n FROM history")["n"][0], len(made.files()))
"""


@pytest.mark.needs("root", "mount")
def test_a_full_disk_loses_nothing_of_the_history_and_is_one_clear_line(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    out.mkdir()
    filled(other, 40)
    argv = ("unshare", "--mount", sys.executable, "-c", FULL, str(out), str(Path(__file__).parent), str(other))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    for what in ("APPEND", "FOLD", "MERGE"):
        assert "disk is full" in told[what] or "No space left" in told[what], told
        assert told[f"{what}-KEPT"] == "30 0"
    assert told["LEFT"] == "30 0 ['history']"
    assert told["AFTER"] == "31 1"
