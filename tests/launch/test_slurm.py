"""The private Slurm: nothing of it stays, whichever way the process that holds it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from dtprobe.errors import UsageError
from dtprobe.launch.slurm import cluster

HOLDER = """
import os, subprocess, sys
from pathlib import Path
from dtprobe.launch.slurm import cluster

folder, seconds = Path(sys.argv[1]), sys.argv[2]
with cluster(folder) as told:
    script = folder / "job.sh"
    script.write_text(f"#!/bin/sh\\nexec srun sleep {seconds}\\n")
    batch = ["sbatch", "--nodes=2", "--ntasks=2", "--output=/dev/null", str(script)]
    subprocess.run(batch, env={**os.environ, **told}, check=True, stdout=subprocess.DEVNULL)
    print("up", flush=True)
    sys.stdin.read()
"""


def of(folder, seconds):
    """Processes that have a file of the folder open, name it, or sleep so long: step daemons hide all but the first."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        try:
            names = [*(one.info["cmdline"] or ()), *(file.path for file in one.open_files())]
        except psutil.Error:
            continue
        if any(str(folder) in name for name in names) or seconds in names:
            found.append(one)
    return found


@pytest.fixture
def short():
    """A folder with a short name."""
    with tempfile.TemporaryDirectory(prefix="dtp") as folder:
        yield Path(folder)


def test_a_folder_with_too_long_a_name_for_sockets_is_refused_before_anything_starts(tmp_path):
    folder = tmp_path / ("long" * 20)
    with pytest.raises(UsageError, match="name a shorter folder"), cluster(folder):
        pass
    assert not folder.exists()


@pytest.mark.needs("slurm")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_cluster_ends_with_its_holder_and_so_do_the_steps_that_it_detached(short, signum):
    folder = short / "slurm"
    seconds = f"863{int(signum):02}"  # each test knows its own
    argv = [sys.executable, "-c", HOLDER, str(folder), seconds]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as holder:
        assert holder.stdout.readline().strip() == "up"
        within(60, lambda: sum(one.name() == "sleep" for one in of(folder, seconds)) == 2)
        assert any("slurmstepd" in one.name() for one in of(folder, seconds))
        holder.send_signal(signum)
        holder.wait(30)
    within(20, lambda: not of(folder, seconds))


def within(seconds, true):
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.1)
