"""Run folders: whole or absent, honest about being unfinished, found again by many names."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.store import RunFolder, Store

START = 1_750_000_000_000_000_000
SECOND = 10**9
VERDICT = {
    "schema": "dtprobe.verdict/1",
    "failure_mode": "filestore-race",
    "verdict": "partly",
    "mitigation": "held",
    "expected": "partly",
    "as_expected": True,
    "torch": "2.13.0",
    "metrics": {},
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "runs", need_bytes=0)


def made(
    store: Store, at_s: int = 0, token: str | None = None, scenario: str = "filestore-race", variant: str = "torn"
) -> RunFolder:
    return store.create(scenario, variant, {"seed": 7}, started_ns=START + at_s * SECOND, token=token)


def test_a_new_run_lies_where_the_design_says_and_is_unfinished(store: Store) -> None:
    with made(store, token="0badcafe") as run:
        assert run.path == store.out / "filestore-race.torn" / "20250615T150640Z-0badcafe"
        facts = json.loads((run.path / "run.json").read_text())
    assert facts["schema"] == "dtprobe.run/1"
    assert (facts["state"], facts["seed"], facts["variant"], facts["started_ns"]) == ("unfinished", 7, "torn", START)


def test_a_finished_run_says_so_and_is_in_the_history(store: Store) -> None:
    run = made(store)
    run.update(arm_runs=[{"arm": "control", "repeat": 0}])
    run.write_verdict(VERDICT)
    store.finish(run, now_ns=lambda: START + 9 * SECOND)
    again = RunFolder.open(run.path)
    assert (again.state, again.facts["ended_ns"], again.scenario) == ("finished", START + 9 * SECOND, "filestore-race:torn")
    assert again.facts["arm_runs"] == [{"arm": "control", "repeat": 0}]
    assert store.history.read().frame()["run"].tolist() == [run.id]


def test_a_run_without_a_verdict_cannot_be_finished(store: Store) -> None:
    with made(store) as run, pytest.raises(DtprobeError, match=r"no verdict\.json"):
        store.finish(run, now_ns=lambda: START)
    assert RunFolder.open(run.path).state == "unfinished"


def test_an_interrupted_run_is_neither_finished_nor_running(store: Store) -> None:
    run = made(store)
    store.interrupt(run, now_ns=lambda: START + SECOND)
    again = RunFolder.open(run.path)
    assert (again.state, again.running()) == ("interrupted", False)


def test_a_run_is_seen_to_run_by_others_until_its_maker_lets_go(store: Store) -> None:
    run = made(store)
    assert RunFolder.open(run.path).running()
    assert RunFolder.open(run.path).running(), "looking must not end it"
    run.close()
    assert not RunFolder.open(run.path).running()


def test_frames_keep_their_nulls_and_dtypes(store: Store) -> None:
    frame = pd.DataFrame(
        {
            "t_ns": pd.array([1, None], dtype="Int64"),
            "value": pd.array([0.5, None], dtype="Float64"),
            "retired": pd.array([True, None], dtype="boolean"),
            "kind": pd.array(["a", None], dtype="string"),
        },
        index=[5, 9],
    )
    with made(store) as run:
        run.write_frame("events", frame)
        again = run.frame("events")
        assert run.frame_names() == ["events"]
    pd.testing.assert_frame_equal(again, frame.reset_index(drop=True), check_dtype=False)
    assert [str(kind) for kind in again.dtypes[:3]] == ["Int64", "Float64", "boolean"]


def test_a_truncated_frame_is_one_clear_error(store: Store) -> None:
    with made(store) as run:
        path = run.write_frame("events", pd.DataFrame({"a": range(1000)}))
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(DtprobeError, match=r"events\.parquet: cannot be read"):
            run.frame("events")
        with pytest.raises(DtprobeError, match="cannot be read"):
            run.frame("no-such-frame")


def test_json_holds_what_a_harness_has_and_turns_what_json_lacks_into_null(store: Store) -> None:
    with made(store) as run:
        run.update(
            argv=("a", os.fsdecode(b"\xff")),
            place=Path("/x"),
            ratio=float("inf"),
            count=pd.Series([3]).iloc[0],
            kinds={"b", "a"},
        )
    facts = json.loads((run.path / "run.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (facts["place"], facts["ratio"], facts["count"], facts["kinds"]) == ("/x", None, 3, ["a", "b"])


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schema": "dtprobe.run/99"}', "\0" * 100, "[" * 100_000],
    ids=["empty", "cut", "list", "newer", "zeros", "deep"],
)
def test_a_damaged_run_is_listed_with_its_problem_beside_the_others(store: Store, text: str) -> None:
    good, bad = made(store, 1), made(store, 2)
    (bad.path / "run.json").write_text(text)
    first, second = store.runs()
    assert first.run is None
    assert str(bad.path) in first.problem
    assert second.run is not None
    assert second.run.id == good.id
    with pytest.raises(DtprobeError, match=r"run\.json"):
        store.find("latest")


def test_runs_are_found_by_latest_id_prefix_hex_scenario_and_folder(store: Store) -> None:
    old = made(store, 0, "aaaa0000")
    new = made(store, 60, "bbbb0000")
    other = made(store, 30, "cccc0000", "gloo-thread-leak", "")
    for reference, run in {
        "latest": new,
        old.id: old,
        "20250615T150640": old,
        "cccc": other,
        "filestore-race:torn": new,
        "filestore_race:torn": new,
        "gloo-thread-leak": other,
        str(old.path): old,
    }.items():
        assert store.find(reference).id == run.id, reference


def test_latest_of_one_second_is_the_one_that_started_last(store: Store) -> None:
    parent = store.out / "x"
    first = RunFolder.create(parent, {"scenario": "x"}, started_ns=START + 1, token="ffffffff")
    second = RunFolder.create(parent, {"scenario": "x"}, started_ns=START + 2, token="00000000")
    assert first.id > second.id
    assert store.find("latest").id == second.id


def test_an_ambiguous_prefix_names_the_candidates(store: Store) -> None:
    made(store, 0, "aaaa0000"), made(store, 1, "aaaa1111")
    with pytest.raises(UsageError, match=r"'aaaa' begins 2 runs: .*aaaa1111.*aaaa0000.*give more"):
        store.find("aaaa")


def test_an_unknown_run_offers_the_closest(store: Store) -> None:
    made(store)
    with pytest.raises(UsageError, match=r"no run 'filestore-rac:torn'.*perhaps filestore-race:torn"):
        store.find("filestore-rac:torn")


def test_an_empty_or_absent_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no runs"):
        Store(tmp_path / "nothing").find("latest")
    assert Store(tmp_path / "nothing").runs() == []


@pytest.mark.parametrize("name", ["history", "..", "a/b", "", ".hidden", "a.b"])
def test_a_scenario_name_that_would_leave_its_place_is_refused(store: Store, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name"):
        store.create(name, "", {}, started_ns=START)


def test_an_out_that_is_a_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=r"--out .* not a folder one can write to"):
            Store.open(out)


def test_an_out_without_permission_is_a_usage_error(tmp_path: Path) -> None:
    out = Path("/proc/self/out") if os.geteuid() == 0 else tmp_path / "closed" / "out"
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(UsageError, match="not a folder one can write to"):
        Store.open(out)


def test_too_little_space_is_said_with_both_values_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(DtprobeError, match=r"free, a run may need 8192\.0 TiB; free some space"):
        Store.open(tmp_path, need_bytes=2**53)
    assert list(tmp_path.iterdir()) == []


def test_what_makers_killed_before_the_rename_left_is_swept_when_old(store: Store) -> None:
    made(store).close()
    parent = store.out / "filestore-race.torn"
    for name, age_s in ((".new-old", 7200), (".new-young", 60)):
        (parent / name).mkdir()
        os.utime(parent / name, ns=(START - age_s * SECOND,) * 2)
    made(store, 1).close()
    assert sorted(path.name for path in parent.glob(".new-*")) == [".new-young"]


WRITER = """
import sys
from pathlib import Path
import pandas as pd
from dtprobe.store import Store
store = Store.open(Path(sys.argv[1]), need_bytes=0)
for number in range(10**6):
    run = store.create("killed", "", {"number": number}, started_ns=1_750_000_000_000_000_000 + number * 10**9)
    if number == 0:
        print("go", flush=True)
    for step in range(5):
        run.update(arm_runs=[{"arm": "control", "repeat": repeat} for repeat in range(step * 50)])
        run.write_frame("events", pd.DataFrame({"t_ns": range(2000)}))
    run.write_verdict({"verdict": "partly", "metrics": {}})
    store.finish(run, now_ns=lambda: 1)
"""


@pytest.mark.parametrize("seed", range(6))
def test_a_writer_killed_at_any_moment_leaves_a_parseable_folder_that_says_unfinished(tmp_path: Path, seed: int) -> None:
    writer = subprocess.Popen((sys.executable, "-c", WRITER, str(tmp_path)), stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"go\n"
        time.sleep(random.Random(seed).uniform(0, 0.3))  # the random moment
        assert writer.poll() is None
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    store = Store(tmp_path)
    listed = store.runs()
    assert [entry.problem for entry in listed if entry.run is None] == []
    runs = [entry.run for entry in listed if entry.run is not None]
    states = [run.state for run in runs]
    assert set(states[1:]) <= {"finished"}, "all but the newest were finished"
    assert states[0] in ("unfinished", "finished")
    assert not any(run.running() for run in runs)
    for run in runs:
        for name in run.frame_names():
            assert len(run.frame(name)) == 2000
    recorded = set(store.history.read().frame()["run"])
    assert {run.id for run in runs if run.state == "finished"} <= recorded <= {run.id for run in runs}


FULL = """
import os, subprocess, sys, time
from pathlib import Path
import pandas as pd
from dtprobe.errors import DtprobeError
from dtprobe.store import RunFolder, Store
out = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(out)], check=True)
try:
    Store.open(out)
except DtprobeError as error:
    print("START", error)
store = Store.open(out, need_bytes=0)
run = store.create("full", "", {}, started_ns=1_750_000_000_000_000_000)
run.update(note="before")
for what, write in {
    "FRAME": lambda: run.write_frame("noise", pd.DataFrame({"x": list(os.urandom(2_000_000))})),
    "TEXT": lambda: run.write_text("report.md", "x" * 2_000_000),
    "JSON": lambda: run.update(note="x" * 2_000_000),
}.items():
    try:
        write()
        print(what, "was written")
    except DtprobeError as error:
        print(what, error)
again = RunFolder.open(run.path)
print("KEPT", again.state, again.facts["note"], sorted(path.name for path in run.path.iterdir()), list((run.path / "frames").iterdir()))
"""


@pytest.mark.needs("root", "mount")
def test_a_disk_that_fills_up_is_one_clear_line_and_keeps_what_was_written(tmp_path: Path) -> None:
    done = subprocess.run(
        ("unshare", "--mount", sys.executable, "-c", FULL, str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert "1.0 MiB free, a run may need 256.0 MiB" in told["START"]
    for what in ("FRAME", "TEXT", "JSON"):
        assert "the disk is full" in told[what], told
        assert "--out" in told[what]
    assert told["KEPT"] == "unfinished before ['frames', 'run.json'] []"
