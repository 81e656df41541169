"""Nights that are killed and resumed, and nights at the same time in one folder: nothing is lost, nothing doubled."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dtprobe import store

CONTENT = Path(__file__).resolve().parents[1] / "content"
MOMENTS = 5


@contextmanager
def night(out, *words):
    """A night in a session of its own; whatever of it still lives at the end is killed."""
    told = ["nightly", "--path", CONTENT, "--out", out, "--repeats", "1", "--jobs", "2", *words]
    process = subprocess.Popen(
        [sys.executable, "-m", "dtprobe", *map(str, told)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process):
    _, said = process.communicate(timeout=200)
    assert process.returncode in (0, 1) and "Traceback" not in said, said
    return process.returncode


def progress_of(process, out):
    """What the night says of itself, None before it says anything."""
    found = list(out.glob(f"suites/*-{process.pid}/progress.json"))
    return json.loads(found[0].read_text()) if found else None


def wait_until(process, out, holds):
    """Until its progress is so, or the night has ended."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if (said := progress_of(process, out)) and holds(said):
            return
        time.sleep(0.01)


def results(folder):
    """What a night found, without what differs from one night to the next: folders, times, and the figures measured."""
    data = json.loads((folder / "summary.json").read_text())
    told = ("scenario", "status", "verdict", "expected", "mitigation", "title", "claim")
    rows = [
        {
            **{name: row[name] for name in told},
            "runs": sorted((run["number"], run["seed"], run["status"]) for run in row["runs"]),
        }
        for row in data["scenarios"]
    ]
    cases = [
        (case.get("classname"), case.get("name"), sorted(one.tag for one in case))
        for case in ElementTree.parse(folder / "junit.xml").iter("testcase")
    ]
    return rows, sorted(cases), data["well"], data["interrupted"]


def assert_entered_once(out, folder):
    """Each run of the night is in the history once, and is the one that the summary shows."""
    data = json.loads((folder / "summary.json").read_text())
    shown = sorted(run["folder"].rpartition("/")[2] for row in data["scenarios"] for run in (row["runs"] or (row,)))
    reading = store.history(out)
    try:
        entered = reading.sql("SELECT DISTINCT run FROM history WHERE night = $1", [folder.name])
    finally:
        reading.close()
    assert sorted(entered["run"]) == shown and shown


@pytest.mark.nightly
def test_a_night_that_was_killed_beside_another_ends_as_the_other_did(tmp_path):
    chosen = ("--only", "quick:plain,quick:crashes,quick:needy", "--retries", "0", "--seed", "7")
    with night(tmp_path, *chosen) as killed, night(tmp_path, *chosen) as unbroken:
        wait_until(killed, tmp_path, lambda said: said["done"] and said["running"])
        killed.kill()
        killed.wait(timeout=10)
        assert not progress_of(killed, tmp_path)["ended"]
        assert ended(unbroken) == 1
    (broken_off,) = tmp_path.glob(f"suites/*-{killed.pid}")
    (whole,) = tmp_path.glob(f"suites/*-{unbroken.pid}")
    assert not (broken_off / "summary.json").exists()
    with night(tmp_path, "--resume", broken_off.name) as resumed:
        assert ended(resumed) == 1
    assert len(list((tmp_path / "suites").iterdir())) == 2, "a resumed night stays one"
    assert results(broken_off) == results(whole)
    for folder in (broken_off, whole):
        assert_entered_once(tmp_path, folder)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(MOMENTS))
def test_a_night_killed_at_any_moment_ends_as_an_unbroken_one(tmp_path, seed):
    rng = random.Random(seed)
    chosen = ("--only", "quick:plain,quick:crashes,quick:needy,quick:leaves", "--retries", "2", "--seed", "7")
    with night(tmp_path / "whole", *chosen) as unbroken:
        began = time.monotonic()
        code = ended(unbroken)
        took_s = time.monotonic() - began
    (whole,) = (tmp_path / "whole" / "suites").iterdir()
    out = tmp_path / "killed"
    with night(out, *chosen) as killed:
        wait_until(killed, out, lambda said: True)
        time.sleep(rng.uniform(0, took_s))
        if rng.random() < 0.5:
            os.killpg(killed.pid, signal.SIGKILL)
        killed.kill()
        killed.wait(timeout=10)
    with night(out, "--resume", "latest") as resumed:
        assert ended(resumed) == code
    (folder,) = (out / "suites").iterdir()
    assert results(folder) == results(whole)
    assert_entered_once(out, folder)
