"""The markers and the guard that every other test relies on, in a pytest of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MARKERS = "markers =\n  needs(*capabilities): x\n  nightly: x\n  alone: x\n"


@pytest.fixture
def suite(tmp_path: Path):
    """Runs pytest over one test file beside this suite's conftest; answers its exit code and output."""
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = -ra --strict-markers -p no:cacheprovider\n{MARKERS}")
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text())

    def run(source: str, *arguments: str, **variables: str) -> tuple[int, str]:
        (tmp_path / "test_it.py").write_text(f"import os, subprocess, sys, pytest\n{source}")
        environ = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("PYTEST_")}
        environ["PYTHONPATH"] = str(HERE.parent)
        done = subprocess.run(
            (sys.executable, "-m", "pytest", *arguments),
            cwd=tmp_path,
            env=environ | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return run


NEEDS = """
@pytest.mark.needs("linux")
def test_has(): pass
@pytest.mark.needs("linux", "package:no-such-package-anywhere")
def test_curable(): pass
@pytest.mark.needs("cuda:999")
def test_incurable(): pass
"""


def test_needs_skips_with_the_doctors_reason(suite) -> None:
    code, output = suite(NEEDS)
    assert code == 0
    assert "1 passed, 2 skipped" in output
    assert "no-such-package-anywhere is not installed (pip install no-such-package-anywhere)" in output
    assert "GPUs visible, 999 needed" in output


def test_in_ci_a_skip_that_a_package_would_cure_fails_and_another_does_not(suite) -> None:
    code, output = suite(NEEDS, CI="true")
    assert code == 1
    assert re.search(r"1 passed, 1 skipped, 1 error", output)
    assert "in CI this must run" in output


def test_an_unknown_capability_is_an_error_not_a_skip(suite) -> None:
    code, output = suite("@pytest.mark.needs('strac')\ndef test_it(): pass\n")
    assert code == 1
    assert "perhaps strace" in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((), "1 passed, 1 deselected"), (("--nightly",), "2 passed"), (("-m", "nightly"), "1 passed, 1 deselected")],
)
def test_nightly_runs_only_when_asked_for(suite, arguments: tuple[str, ...], expected: str) -> None:
    _, output = suite("@pytest.mark.nightly\ndef test_long(): pass\ndef test_short(): pass\n", *arguments)
    assert expected in output


def test_alone_tests_never_overlap_whichever_workers_they_are_on(suite, tmp_path: Path) -> None:
    source = """
import time
@pytest.mark.parametrize("number", range(8))
@pytest.mark.alone
def test_alone(number, worker_id):
    os.mkdir("busy")  # raises where another is at work
    with open("alone.txt", "a") as log:
        log.write(worker_id + "\\n")
    time.sleep(0.1)
    os.rmdir("busy")
"""
    code, output = suite(source, "-n", "2")
    assert code == 0, output
    assert len((tmp_path / "alone.txt").read_text().split()) == 8


def test_a_process_left_running_fails_its_own_test_and_is_ended(suite, tmp_path: Path) -> None:
    source = """
def test_leaves():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("pid.txt", "w").write(str(child.pid))
def test_next(): pass
"""
    code, output = suite(source)
    assert code == 1
    assert "left behind" in output
    assert "time.sleep(600)" in output
    assert "2 passed, 1 error" in output
    assert not Path("/proc", (tmp_path / "pid.txt").read_text()).exists()


def test_processes_of_a_wider_fixture_are_not_the_tests(suite) -> None:
    source = """
@pytest.fixture(scope="module")
def server():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.communicate()
def test_one(server): pass
def test_two(server): pass
"""
    code, output = suite(source)
    assert code == 0, output
