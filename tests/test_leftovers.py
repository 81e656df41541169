"""Leftovers of runs whose harness and warden both died: found, cleaned, and nothing else touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dtprobe import ledger, leftovers, processes, undo
from dtprobe.confine import Confinement
from dtprobe.ledger import Entry, Ledger, Owner
from dtprobe.processes import Identity

# `clean` ends the processes of every dead run on the machine, those of a neighbouring test too.
pytestmark = pytest.mark.alone

ROOT = Path(processes.__file__).resolve().parents[1]
SLEEP = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)")
PATIENCE_S = 60.0

HARNESS = """
import os, sys, time
from pathlib import Path
from dtprobe.confine import Confinement
run_id, folder = sys.argv[1], Path(sys.argv[2])
box = Confinement.open(run_id)
program = f'''
import os, time
open(f"/dev/shm/torch_{{os.getpid()}}_{run_id}_0", "x").close()
if os.fork() == 0:
    os.setsid()
os.write(1, b"x\\\\n")
time.sleep(600)
'''
argv = [sys.executable, "-I", "-S", "-c", program]
box.spawn(argv, env=dict(os.environ), cwd=folder, stdout=folder / "out", stderr=folder / "err", held=False)
box.undo("file", path=str(folder / "made"))
(folder / "made").touch()
while (folder / "out").read_text().count("x") < 2 or '"shm"' not in box.journal.read_text():
    time.sleep(0.01)
print(box.warden_pid, flush=True)
time.sleep(600)
"""


class Wreck(NamedTuple):
    """A run whose harness and warden were killed."""

    run_id: str
    environ: dict[str, str]
    warden: int


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tmp").mkdir()
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}


@pytest.fixture
def run_id() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def wreck(tmp_path: Path, environ: dict[str, str], run_id: str) -> Iterator[Wreck]:
    """Stopped first, so that the warden cannot tear down after the harness."""
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, run_id, str(tmp_path)], env=environ, stdout=subprocess.PIPE, text=True
    )
    assert harness.stdout is not None
    warden = int(harness.stdout.readline())
    os.kill(warden, signal.SIGSTOP)
    give_up = time.monotonic() + PATIENCE_S
    while (found := processes.read(warden)) is not None and found.state != "T" and time.monotonic() < give_up:
        time.sleep(0.01)
    harness.kill()
    harness.wait()
    harness.stdout.close()
    yield Wreck(run_id, environ, warden)
    leftovers.clean(environ)
    assert processes.marked(run_id) == [] and not list(undo.SHM.glob(f"*{run_id}*"))


def kill_warden(wreck: Wreck) -> None:
    os.kill(wreck.warden, signal.SIGKILL)
    wait_until_gone(wreck.warden)


def wait_until_gone(pid: int) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while (one := processes.read(pid)) is not None and not one.ended:
        assert time.monotonic() < give_up, f"{pid} lives on"
        time.sleep(0.01)


def kinds(found: list[leftovers.Leftover], run_id: str) -> set[str]:
    return {one.kind for one in found if one.run_id == run_id}


def test_a_wreck_is_found_and_cleaned(wreck: Wreck, tmp_path: Path) -> None:
    kill_warden(wreck)
    before = leftovers.find(wreck.environ)
    assert {"process", "temp_dir", "file", "shm", "journal"} <= kinds(before, wreck.run_id)
    assert (tmp_path / "made").exists() and processes.marked(wreck.run_id)  # finding touches nothing
    cleaned = leftovers.clean(wreck.environ)
    ours = [one for one in cleaned if one.run_id == wreck.run_id]
    assert ours and all(one.cleaned for one in ours), [str(one) for one in ours]
    assert not (tmp_path / "made").exists() and not list((tmp_path / "tmp").iterdir())
    assert processes.marked(wreck.run_id) == []
    assert kinds(leftovers.find(wreck.environ), wreck.run_id) == set()


def test_a_stopped_warden_of_a_dead_harness_is_a_leftover_too(wreck: Wreck) -> None:
    assert "process" in kinds(leftovers.find(wreck.environ), wreck.run_id)
    assert all(one.cleaned for one in leftovers.clean(wreck.environ) if one.run_id == wreck.run_id)
    wait_until_gone(wreck.warden)
    assert kinds(leftovers.find(wreck.environ), wreck.run_id) == set()


def test_processes_are_found_when_the_journal_is_elsewhere(wreck: Wreck, tmp_path: Path) -> None:
    kill_warden(wreck)
    elsewhere = {**wreck.environ, "XDG_STATE_HOME": str(tmp_path / "elsewhere")}
    assert kinds(leftovers.find(elsewhere), wreck.run_id) == {"process"}
    assert all(one.cleaned for one in leftovers.clean(elsewhere) if one.run_id == wreck.run_id)
    assert processes.marked(wreck.run_id) == []


def test_a_live_run_is_never_touched(environ: dict[str, str], run_id: str, tmp_path: Path) -> None:
    with Confinement.open(run_id, environ=environ) as box:
        child = box.spawn(SLEEP, env={}, cwd=tmp_path, stdout=tmp_path / "out", stderr=tmp_path / "err", held=False)
        held = box.spawn(SLEEP, env={}, cwd=tmp_path, stdout=tmp_path / "out", stderr=tmp_path / "err")
        assert kinds(leftovers.clean(environ), run_id) == set()
        elsewhere = {**environ, "XDG_STATE_HOME": str(tmp_path / "elsewhere")}
        assert kinds(leftovers.clean(elsewhere), run_id) == set()
        assert box.poll(child) is None and box.poll(held) is None
        assert box.scratch.is_dir() and box.journal.exists()


def owner(run_id: str, **changes: object) -> Owner:
    """A run of this machine whose harness and warden are gone."""
    gone = Identity(os.getpid(), 1)
    here = Owner(run_id, os.uname().nodename, ledger.boot_id(), processes.pid_namespace(), gone, gone)
    return here._replace(**changes)  # type: ignore[arg-type]


def journal(environ: dict[str, str], who: Owner, *entries: tuple[str, dict[str, object]]) -> Path:
    made = Ledger.create(ledger.folder(environ), who)
    for kind, data in entries:
        made.announce(kind, data)
    made.release()
    return made.path


@pytest.mark.parametrize("change", [{"host": "another"}, {"namespace": 1}])
def test_journals_of_other_machines_and_pid_namespaces_stay(
    environ: dict[str, str], run_id: str, tmp_path: Path, change: dict[str, object]
) -> None:
    path = journal(environ, owner(run_id, **change), ("file", {"path": str(tmp_path / "theirs")}))
    (tmp_path / "theirs").touch()
    assert kinds(leftovers.clean(environ), run_id) == set()
    assert path.exists() and (tmp_path / "theirs").exists()


def test_after_a_restart_files_go_and_pids_count_for_nothing(environ: dict[str, str], run_id: str, tmp_path: Path) -> None:
    bystander = subprocess.Popen(SLEEP)
    try:
        found = processes.identity(bystander.pid)
        assert found is not None
        entries = ("process", found._asdict()), ("file", {"path": str(tmp_path / "made")})
        path = journal(environ, owner(run_id, boot="an earlier one"), *entries)
        (tmp_path / "made").touch()
        assert kinds(leftovers.clean(environ), run_id) == {"file", "journal"}
        assert not path.exists() and not (tmp_path / "made").exists()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_process_entry_meets_only_the_process_it_names(environ: dict[str, str], run_id: str) -> None:
    named, reused = subprocess.Popen(SLEEP), subprocess.Popen(SLEEP)
    try:
        first, second = processes.identity(named.pid), processes.identity(reused.pid)
        assert first is not None and second is not None
        later = {"pid": second.pid, "start": second.start - 1}
        journal(environ, owner(run_id), ("process", first._asdict()), ("process", later))
        leftovers.clean(environ)
        assert named.wait(PATIENCE_S) == -signal.SIGKILL
        assert reused.poll() is None
    finally:
        for one in (named, reused):
            one.kill()
            one.wait()


def test_a_foreign_process_with_an_odd_marker_stays(environ: dict[str, str], run_id: str) -> None:
    odd = subprocess.Popen(SLEEP, env={processes.RUN_ID: run_id, processes.HARNESS: "not.a.marker"})
    try:
        assert kinds(leftovers.clean(environ), run_id) == set()
        assert odd.poll() is None
    finally:
        odd.kill()
        odd.wait()


def test_what_cannot_be_undone_is_said_and_stays_in_the_journal(environ: dict[str, str], run_id: str) -> None:
    path = journal(environ, owner(run_id), ("command", {"argv": ["false"]}))
    told = [one for one in leftovers.clean(environ) if one.run_id == run_id]
    assert {one.cleaned for one in told} == {False}
    assert all("command false: exit 1" in one.problem for one in told)
    assert path.exists()


@pytest.mark.parametrize("text", ["", "noise\n", '{"schema": "other"}\n', "[]\n", '{"schema": "dtprobe.ledger/1"}\n'])
def test_a_journal_that_is_none_is_named_and_removed_once_it_is_old(environ: dict[str, str], run_id: str, text: str) -> None:
    path = ledger.folder(environ) / f"{run_id}.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert kinds(leftovers.clean(environ), run_id) == set()  # it may be being written at this moment
    assert path.exists()
    os.utime(path, (0, 0))
    (told,) = (one for one in leftovers.find(environ) if one.run_id == run_id)
    assert "is not a journal of a run" in str(told)
    assert [one.cleaned for one in leftovers.clean(environ) if one.run_id == run_id] == [True]
    assert not path.exists()


def test_a_line_that_a_crash_cut_short_is_ignored(environ: dict[str, str], run_id: str, tmp_path: Path) -> None:
    path = journal(environ, owner(run_id), ("file", {"path": str(tmp_path / "made")}))
    with path.open("a") as file:
        file.write(json.dumps({"n": 2, "kind": "file", "data": {"path": str(tmp_path)}})[:-4])
    _, read = ledger.reopen(path)
    read.release()
    assert list(read.pending.values()) == [Entry(1, "file", {"path": str(tmp_path / "made")})]


def test_a_leftover_prints_as_one_line_and_as_json() -> None:
    one = leftovers.Leftover("r", "file", "file /x")
    assert str(one) == "run r: file /x: left behind"
    assert json.loads(json.dumps(one.as_json()))["kind"] == "file"
