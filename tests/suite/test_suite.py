"""Many scenarios in one go: what each said, one summary, and an end that is clean whenever it comes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

CONTENT = Path(__file__).resolve().parents[1] / "content"


def command(out, only, *words):
    told = [
        "nightly",
        "--path",
        CONTENT,
        "--out",
        out,
        "--only",
        only,
        "--repeats",
        "1",
        "--jobs",
        "2",
        "--retries",
        "0",
        *words,
    ]
    return [sys.executable, "-m", "dtprobe", *map(str, told)]


def nightly(out, only, *words):
    return subprocess.run(command(out, only, *words), capture_output=True, text=True, timeout=240, check=False)


def test_each_scenario_says_what_became_of_it_in_one_summary(tmp_path):
    done = nightly(tmp_path / "out", "quick:plain,quick:crashes,quick:needy", "--json", "--claims", tmp_path / "claims.md")
    data = json.loads(done.stdout)
    assert done.returncode == 1 and not data["well"], done.stderr
    found = {row["scenario"]: row for row in data["scenarios"]}
    assert {name: row["status"] for name, row in found.items()} == {
        "quick:plain": "as-expected",
        "quick:crashes": "not-as-expected",
        "quick:needy": "unsupported",
    }
    assert "cuda:64" in found["quick:needy"]["because"]
    (folder,) = (tmp_path / "out" / "suites").iterdir()
    page = (folder / "summary.html").read_text()
    links = re.findall(r'href="(\./\.\./\.\./[^"]+)"', page)
    assert len(links) == 3 and all((folder / link).is_file() for link in links)
    assert page.index("quick:crashes") < page.index("quick:plain"), "what is wrong comes first"
    assert "1 of 3 scenarios as expected, 1 unsupported" in (folder / "summary.md").read_text()
    (suite,) = ElementTree.parse(folder / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    claims = (tmp_path / "claims.md").read_text()
    assert "| `quick:plain` | steps take no time | reproduced, the cure held |" in claims and "needy" not in claims


@contextmanager
def running(out, only, temporary):
    """A suite in a session of its own, from the moment at which ranks of its first scenario are there."""
    temporary.mkdir()
    suite = subprocess.Popen(
        command(out, only, "--jobs", "1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        deadline = time.monotonic() + 60
        while not list(out.glob("*/*/*/0/rank0/process.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield suite
    finally:
        suite.kill()
        suite.communicate()


def assert_nothing_left(out, temporary):
    deadline = time.monotonic() + 20
    while (left := held(out) + list(temporary.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, left


def held(out):
    """Processes with the folder in their environment: ranks, and what they started."""
    return [one for one in psutil.process_iter(["environ"]) if str(out) in str(one.info["environ"])]


def test_an_interrupt_ends_what_runs_and_leaves_a_summary(tmp_path):
    out, temporary = tmp_path / "out", tmp_path / "tmp"
    with running(out, "quick:lasts,quick:misjudged", temporary) as suite:
        os.killpg(suite.pid, signal.SIGINT)
        _, said = suite.communicate(timeout=60)
    assert suite.returncode == 130 and "Traceback" not in said, said
    (summary,) = out.glob("suites/*/summary.json")
    data = json.loads(summary.read_text())
    assert data["interrupted"] and [row["status"] for row in data["scenarios"]][1:] == ["not-run"], data
    assert_nothing_left(out, temporary)


def test_a_killed_suite_leaves_no_process_no_temporary_file_and_no_finished_run(tmp_path):
    out, temporary = tmp_path / "out", tmp_path / "tmp"
    with running(out, "quick:lasts", temporary) as suite:
        suite.kill()
        suite.wait(timeout=10)
        assert_nothing_left(out, temporary)
    (run,) = out.glob("quick.lasts/*/run.json")
    assert json.loads(run.read_text())["state"] in ("unfinished", "interrupted")


@pytest.mark.parametrize(
    ("only", "words", "says"),
    [
        ("quik", (), "did you mean quick"),
        ("quick", ("--jobs", "0"), "--jobs 0"),
        ("quick", ("--claims", "/no/such/claims.md"), "--claims /no/such/claims.md"),
    ],
)
def test_what_cannot_be_run_is_one_line(tmp_path, only, words, says):
    done = nightly(tmp_path / "out", only, *words)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


def test_those_that_are_to_be_alone_come_last_and_hold_up_nobody(tmp_path):
    out = tmp_path / "out"
    done = nightly(out, "quick:single,quick:plain,quick:crashes", "--json")
    assert len(json.loads(done.stdout)["scenarios"]) == 3, done.stderr
    runs = [json.loads(path.read_text()) for path in out.glob("*/*/run.json")]
    (single,) = [run for run in runs if run["variant"] == "single"]
    others = [run for run in runs if run["variant"] != "single"]
    assert len(others) == 2 and single["started_ns"] > max(run["ended_ns"] for run in others)


def test_scenarios_are_items_in_anybody_s_pytest(tmp_path):
    own = tmp_path / "test_own.py"
    own.write_text("def test_own():\n    pass\n")
    files = [str(own), str(CONTENT / "scenarios" / "quick" / "scenario.py")]
    words = ["-q", "-rs", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)]
    words += [
        "-p",
        "dtprobe",
        "--scenarios",
        "--scenario",
        "quick:needy",
        "--scenario-out",
        str(tmp_path / "runs"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *files],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0 and "1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "cuda:64" in done.stdout
