"""The wheel works from an empty folder, and the checkout without any install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The wheel's content in a folder of its own, as pip would lay it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=240)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def ask(path, folder, *words):
    env = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-m", "dtprobe", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)


def test_the_wheel_carries_scenarios_injectors_and_templates(unpacked):
    content = unpacked / "dtprobe" / "content"
    for kind in ("scenarios", "injectors"):
        here = {
            path.relative_to(ROOT / kind)
            for path in (ROOT / kind).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        there = {path.relative_to(content / kind) for path in (content / kind).rglob("*") if path.is_file()}
        assert here == there
    assert list((content / "reports" / "templates").glob("*.html.j2"))


def test_the_wheel_runs_a_scenario_from_an_empty_folder(unpacked, tmp_path):
    where = ask(unpacked, tmp_path, "list", "--json")
    assert {"gloo-thread-leak", "filestore-race", "collective-skipped"} <= {entry["name"] for entry in json.loads(where.stdout)}
    done = ask(unpacked, tmp_path, "run", "filestore-race:shell", "--json")
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["as_expected"] is True
    (report,) = tmp_path.glob("runs/*/*/report.html")
    assert "<html" in report.read_text()


def test_the_checkout_runs_without_an_install(tmp_path):
    done = ask(ROOT, tmp_path, "list", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)
