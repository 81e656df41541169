"""Runs of other machines: each once, under its own host, whatever form they come in."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import uuid
from pathlib import Path

import pytest

from dtprobe.errors import UsageError
from dtprobe.store import History, Store, history
from dtprobe.store.merge import merge

START_NS = 1_790_000_000 * 10**9


def run(out: Path, number: int, host: str) -> Path:
    facts = {"machine": {"host": host, "python": "3.11.7"}, "failure_mode": "straggler", "seed": number}
    store = Store.open(out)
    with store.create("slow", "", facts, started_ns=START_NS + number * 10**9) as made:
        metric = {"control": 1.0, "fault": 2.0, "unit": "s"}
        verdict = {"verdict": "partly", "expected": "partly", "as_expected": True, "mitigation": "none", "torch": "2.13.0"}
        made.write_verdict({**verdict, "metrics": {"step": metric}})
        store.finish(made, now_ns=lambda: START_NS + number * 10**9 + 5)
    return made.path


def hosts(out: Path | str) -> list[str]:
    reading = history(out)
    try:
        return list(reading.sql("SELECT host FROM (SELECT DISTINCT run, host FROM history) ORDER BY host")["host"])
    finally:
        reading.close()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_folder_of_runs_comes_in_once_with_its_run_folders(tmp_path):
    run(tmp_path / "here", 0, "here")
    made = [run(tmp_path / "there", number, "there") for number in (1, 2)]
    (made[0] / "control" / "0").mkdir(parents=True)
    (made[0] / "control" / "0" / "log").write_text("lines")
    (made[0] / "outside").symlink_to("/etc/hostname")
    came = merge([tmp_path / "there"], out=tmp_path / "here")
    assert (came.new, came.known, came.problems) == (2, 0, ())
    assert hosts(tmp_path / "here") == ["here", "there", "there"]
    copied = tmp_path / "here" / "slow" / made[0].name
    assert (copied / "control" / "0" / "log").read_text() == "lines" and not (copied / "outside").is_symlink()
    assert Store(tmp_path / "here").find(made[1].name).facts["machine"]["host"] == "there"
    before = files(tmp_path / "here")
    again = merge([tmp_path / "there", tmp_path / "there" / "history", made[0]], out=tmp_path / "here")
    assert (again.new, again.known) == (0, 2)
    assert files(tmp_path / "here") == before


@pytest.mark.parametrize("packed", ["gztar", "xztar", "zip"])
def test_an_archive_of_a_run_folder_comes_in(tmp_path, packed):
    path = run(tmp_path / "there", 1, "there")
    archive = shutil.make_archive(str(tmp_path / "brought"), packed, path.parent, path.name)
    assert merge([archive], out=tmp_path / "here").new == 1
    assert hosts(tmp_path / "here") == ["there"]
    assert files(tmp_path / "here" / "slow" / path.name) == files(path)
    assert merge([archive, tmp_path / "there"], out=tmp_path / "here").new == 0


def evil(path: Path, name: str) -> None:
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo(name)
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: evil(path, "../outside"), "cannot be unpacked"),
        (lambda path: evil(path, "harmless"), "no finished run"),
        (lambda path: path.write_bytes(b"no archive"), "neither a folder nor an archive"),
        (lambda path: path.mkdir(), "no finished run"),
        (lambda path: None, "no such file"),
    ],
)
def test_what_holds_no_run_is_refused_in_one_line_and_writes_nothing_elsewhere(tmp_path, make, says):
    make(tmp_path / "brought")
    with pytest.raises(UsageError, match=says) as refused:
        merge([tmp_path / "brought"], out=tmp_path / "here")
    assert "\n" not in str(refused.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"brought", "here"} and not list(
        (tmp_path / "here").rglob("*.parquet")
    )


def test_an_archive_cut_in_the_middle_is_refused(tmp_path):
    path = run(tmp_path / "there", 1, "there")
    (path / "noise").write_bytes(os.urandom(100_000))
    archive = Path(shutil.make_archive(str(tmp_path / "brought"), "gztar", path.parent, path.name))
    archive.write_bytes(archive.read_bytes()[:50_000])
    with pytest.raises(UsageError, match="cannot be unpacked"):
        merge([archive], out=tmp_path / "here")


def test_a_history_at_a_url_comes_in_and_rows_go_to_one(tmp_path):
    there, shared = f"memory://{uuid.uuid4().hex}", f"memory://{uuid.uuid4().hex}"
    run(tmp_path / "there", 1, "there")
    assert merge([tmp_path / "there"], into=History(there)).new == 1
    run(tmp_path / "here", 0, "here")
    Store.open(tmp_path / "here", history=shared)
    assert merge([there], out=tmp_path / "here").new == 1
    assert hosts(shared) == ["here", "there"] and merge([tmp_path / "here"], into=History(there)).new == 1


def test_a_run_that_was_not_entered_because_its_history_did_not_answer_comes_in_and_one_without_verdict_does_not(tmp_path):
    path = run(tmp_path / "there", 1, "there")
    record = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**record, "state": "unfinished", "ended_ns": None}))
    assert merge([path], out=tmp_path / "here").new == 1 and hosts(tmp_path / "here") == ["there"]
    (path / "verdict.json").unlink()
    with pytest.raises(UsageError, match="unfinished, without a verdict"):
        merge([path], out=tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("run.json", "{ cut"),
        ("run.json", '{"schema": "dtprobe.run/1", "id": "../../up", "scenario": "slow", "started_ns": 1}'),
        ("run.json", '{"schema": "dtprobe.run/1", "id": "20260101T000000Z-00000000", "scenario": "../up", "started_ns": 1}'),
        (
            "run.json",
            '{"schema": "dtprobe.run/1", "id": "20260101T000000Z-00000000", "scenario": "slow", "started_ns": "then"}',
        ),
        ("verdict.json", "[]"),
        ("verdict.json", '{"verdict": "partly", "metrics": {"step": 3}}'),
        ("verdict.json", "{}"),
    ],
)
def test_what_is_damaged_or_hostile_is_named_and_the_rest_comes_in(tmp_path, file, text):
    first, second = (run(tmp_path / "there", number, "there") for number in (1, 2))
    shutil.rmtree(tmp_path / "there" / "history")
    (first / file).write_text(text)
    came = merge([tmp_path / "there"], out=tmp_path / "deep" / "here")
    assert came.new == 1 and len(came.problems) == 1 and str(first) in came.problems[0] and "\n" not in came.problems[0]
    assert (tmp_path / "deep" / "here" / "slow" / second.name).is_dir()
    assert {path.name for path in (tmp_path / "deep").rglob("*") if path.is_dir()} == {"here", "slow", "history", second.name}


def verb(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dtprobe", "history", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_the_verbs_answer_over_a_merged_history_and_refuse_in_one_line(tmp_path):
    for number in range(3):
        run(tmp_path / "there", number, "there")
    out = str(tmp_path / "here")
    assert "3 runs came in" in verb("merge", str(tmp_path / "there"), "--out", out).stdout
    assert json.loads(verb("overview", "--out", out, "--json").stdout)[0]["runs"] == 3
    nothing = verb("regressions", "--out", out)
    assert (nothing.returncode, nothing.stdout.strip()) == (0, "nothing is worse")
    for words in (("overview", "--out", str(tmp_path)), ("merge", str(tmp_path / "no"), "--out", out)):
        refused = verb(*words)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
