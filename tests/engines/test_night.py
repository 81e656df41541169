"""A night on an engine ends as one of this machine does, and one that is killed goes on without a run lost or doubled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtprobe.store import history

from .conftest import held, ray_cluster, within

CONTENT = Path(__file__).resolve().parents[1] / "content"
ONLY = "quick:plain,quick:crashes,quick:needy"


def command(out, on, *words):
    told = ["nightly", "--path", CONTENT, "--out", out, "--repeats", "1", "--retries", "0", "--on", on, "--json", *words]
    return [sys.executable, "-m", "dtprobe", *map(str, told)]


def rows(said):
    return {row["scenario"]: (row["status"], row["verdict"]) for row in json.loads(said)["scenarios"]}


def assert_each_once(out):
    """Run folders, history and summary each have every scenario's run exactly once, and nothing is on its way any more."""
    (night,) = (out / "suites").iterdir()
    summary = json.loads((night / "summary.json").read_text())
    runs = sorted(str(path.parent.relative_to(out)) for path in out.glob("quick*/*/run.json"))
    assert sorted(row["folder"] for row in summary["scenarios"]) == runs
    reading = history(out)
    found = reading.sql("SELECT DISTINCT run, night FROM history ORDER BY run")
    reading.close()
    assert list(found["run"]) == sorted(Path(one).name for one in runs) and set(found["night"]) == {night.name}
    assert not (night / "spread").exists()


@pytest.mark.nightly
@pytest.mark.needs("slurm", "root")
def test_a_night_on_slurm_ends_as_a_local_one(slurm, tmp_path):
    local, spread = (
        subprocess.run(
            command(tmp_path / on, on, "--only", ONLY), env=slurm, capture_output=True, text=True, timeout=240, check=False
        )
        for on in ("local", "slurm")
    )
    assert spread.returncode == local.returncode == 1, spread.stderr
    assert rows(spread.stdout) == rows(local.stdout) and len(rows(spread.stdout)) == 3
    assert_each_once(tmp_path / "slurm")


@pytest.mark.nightly
@pytest.mark.needs("slurm", "root")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_night_on_slurm_goes_on_after_its_end(slurm, tmp_path, signum):
    out = tmp_path / "out"
    words = command(out, "slurm", "--only", ONLY)
    night = subprocess.Popen(words, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    within(90, "a run at work", lambda: list(out.glob("suites/*/spread/.slurm/*/*/run/work/runs/*/*/run.json")))
    night.send_signal(signum)
    _, said = night.communicate(timeout=90)
    assert night.returncode == (130 if signum == signal.SIGINT else -signum), said
    if signum == signal.SIGINT:
        within(30, "nothing left", lambda: not held(out))
    again = subprocess.run(
        command(out, "slurm", "--resume", "latest"), env=slurm, capture_output=True, text=True, timeout=240, check=False
    )
    assert again.returncode == 1, again.stderr
    assert {name: status for name, (status, _) in rows(again.stdout).items()} == {
        "quick:plain": "as-expected",
        "quick:crashes": "not-as-expected",
        "quick:needy": "unsupported",
    }
    assert_each_once(out)
    within(30, "nothing left", lambda: not held(out))


@pytest.mark.nightly
@pytest.mark.needs("ray")
def test_a_night_on_ray_loses_nothing_with_a_node(tmp_path):
    out = tmp_path / "out"
    with ray_cluster(2) as (cluster, nodes):
        words = command(out, f"ray:address={cluster.address}", "--only", ONLY)
        night = subprocess.Popen(words, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        within(120, "runs at work", lambda: len(held("/run/work")) >= 2)
        cluster.remove_node(nodes[0], allow_graceful=False)
        told, said = night.communicate(timeout=240)
    assert night.returncode == 1 and rows(told)["quick:plain"][0] == "as-expected", said
    assert max(row["attempts"] for row in json.loads(told)["scenarios"]) == 2
    assert_each_once(out)
