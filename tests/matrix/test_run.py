"""A matrix end to end, with real venvs, real nights and a failure planted into some versions: found, dated, bisected, resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtprobe.cli import matrix as cli
from dtprobe.errors import UsageError
from dtprobe.matrix.cells import from_options

CONTENT = Path(__file__).with_name("content")
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def command(*words):
    return [sys.executable, "-m", "dtprobe", *map(str, words)]


def nightly(out, *words):
    return command("nightly", "--path", CONTENT, "--only", "planted", "--out", out, "--jobs", "1", *words)


def run(argv, mirror):
    return subprocess.run(argv, env=mirror.environ, capture_output=True, text=True, timeout=240, check=False)


def matrix_of(out):
    (file,) = out.glob("suites/*-matrix/matrix.json")
    return file, json.loads(file.read_text())


@pytest.mark.nightly
def test_a_planted_change_between_versions_is_found_and_dated(mirror, tmp_path):
    out = tmp_path / "out"
    done = run(nightly(out, "--torch", "2.11.0,2.12.0,2.15.0", "--json"), mirror)
    assert done.returncode == 0, done.stderr
    file, kept = matrix_of(out)
    data = json.loads(done.stdout)
    assert data == kept and data["ended"] and data["well"]
    assert [one["state"] for one in data["cells"]] == ["done", "done", "unsupported"]
    assert "CUDA build only" in data["cells"][2]["reason"] and data["cells"][2]["remedy"]
    assert [one["words"] for one in data["changes"]] == ["fixed in torch 2.12.0 (released 2026-05-13)"]
    (row,) = data["scenarios"]
    assert [one["verdict"] for one in row["cells"].values()] == ["reproduced", "not-reproduced"]
    nights = [one["night"] for one in data["cells"] if one["night"]]
    assert all((out / "suites" / night / "summary.json").is_file() for night in nights), "each cell is an ordinary night"
    page = file.with_name("matrix.html").read_text()
    links = re.findall(r'href="\./([^"]+)"', page)
    assert len(links) == 2 + 2 + 2 and all((file.parent / link).is_file() for link in links)
    text = file.with_name("matrix.md").read_text()
    assert "fixed in torch 2.12.0" in text and "| `planted` | reproduced | not-reproduced |" in text
    shown = run(command("matrix", "show", "--out", out), mirror)
    assert "planted: fixed in torch 2.12.0 (released 2026-05-13)" in shown.stdout, "the history alone says the same"


@pytest.mark.nightly
def test_world_sizes_and_launchers_are_cells_too(mirror, tmp_path):
    out = tmp_path / "out"
    done = run(nightly(out, "--torch", "2.12.0", "--world-size", "2,3", "--launcher", "local", "--json"), mirror)
    cells = json.loads(done.stdout)["cells"]
    assert [one["id"].partition("-ranks")[2] for one in cells] == ["2-local", "3-local"]
    sizes = []
    for one in cells:
        (folder,) = [
            Path(run["folder"]) for run in json.loads((out / "suites" / one["night"] / "summary.json").read_text())["scenarios"]
        ]
        sizes.append(len(list((out / folder / "control" / "0").glob("rank*"))))
    assert sizes == [2, 3]


@pytest.mark.nightly
def test_bisection_names_the_first_version_that_differs(mirror, tmp_path):
    out = tmp_path / "out"
    argv = command("matrix", "bisect", "planted", "--good", "2.14.0", "--bad", "2.9.1", "--path", CONTENT, "--out", out)
    done = run(argv, mirror)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith("planted changed in torch 2.12.0: reproduced, cure held with torch 2.11.0")
    _, data = matrix_of(out)
    assert data["bisect"]["first"] == "2.12.0" and len(data["bisect"]["answers"]) < 7
    same = run(
        command("matrix", "bisect", "planted", "--good", "2.13.0", "--bad", "2.14.0", "--path", CONTENT, "--out", out), mirror
    )
    assert same.returncode == 2 and "say the same: not-reproduced" in same.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["building", "running"])
def test_one_that_was_ended_is_gone_on_with_and_leaves_nothing_running(mirror, tmp_path, how, moment):
    out = tmp_path / "out"
    process = subprocess.Popen(
        nightly(out, "--torch", "2.11.0,2.12.0"), env=mirror.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 120
    while time.monotonic() < until:
        found = list(out.glob("suites/*-matrix/matrix.json"))
        states = [one["state"] for one in json.loads(found[0].read_text())["cells"]] if found else []
        if states and states[1 if moment == "running" else 0] == moment:
            break
        time.sleep(0.05)
    os.kill(process.pid, how)
    assert process.wait(timeout=60) in (-how, 130)
    _, data = matrix_of(out)
    assert not data["ended"]
    resumed = run(command("nightly", "--resume", "latest", "--out", out, "--path", CONTENT, "--json"), mirror)
    assert resumed.returncode == 0, resumed.stderr
    _, data = matrix_of(out)
    assert [one["state"] for one in data["cells"]] == ["done", "done"]
    assert [one["words"] for one in data["changes"]] == ["fixed in torch 2.12.0 (released 2026-05-13)"]
    runs = {
        one.name for one in (out / "planted").iterdir() if json.loads((one / "run.json").read_text())["state"] == "finished"
    }
    assert len(runs) == 2, "nothing ran twice to its end"


@pytest.mark.parametrize(
    ("option", "said"),
    [("--claims", "--claims is of one night, a matrix has many"), ("--on", "--on runs the Python of its nodes")],
)
def test_what_only_one_night_can_have_is_refused_before_anything_starts(tmp_path, option, said):
    given = from_options(None, "2.12.0", None, None)
    with pytest.raises(UsageError, match=said):
        cli.night(given, {}, {option: "given"}, out=tmp_path / "out", jobs=1, resume=None, as_json=False)
    assert not (tmp_path / "out").exists()


def test_one_world_size_and_one_launcher_are_a_nights_own(tmp_path):
    def meant(*axes):
        return cli.meant(from_options(*axes), out=tmp_path, resume=None, file=None)

    assert not meant(None, None, "4", "torchrun")
    assert meant(None, None, "2,4", None) and meant("3.12", None, None, None) and meant(None, "2.12.0", None, None)
