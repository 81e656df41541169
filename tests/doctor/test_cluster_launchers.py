"""The command under real launchers, and with faults that the injectors put under it from outside: it runs unmodified."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

_BIN = Path(sys.executable).parent
DOCTOR = ["dtprobe", "doctor", "--cluster"]
TORCHRUN = ["torchrun", "--standalone"]
# as root, on a host with fewer cores than processes
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "btl", "self,sm,tcp"]


@pytest.fixture
def environ() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "OMPI_", "PMI", "TORCHELASTIC_", "MASTER_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return kept | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{_BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }


Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def launch(tmp_path: Path, environ: dict[str, str]) -> Launch:
    """Run a launcher's command to its end, however it ends; what it printed comes from files, which no orphan can hold open."""

    def run(*command: str, extra: dict[str, str] | None = None, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
        process = start(tmp_path, command, environ | (extra or {}))
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)
        out, err = ((tmp_path / name).read_text(errors="replace") for name in ("out", "err"))
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return run


def start(folder: Path, command: tuple[str, ...], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ, cwd=folder)


def only(data: dict[str, Any], check: str) -> dict[str, Any]:
    found = [each for each in data["problems"] if each["check"] == check]
    assert len(found) == 1, data["problems"]
    return found[0]


def test_torchrun_prints_one_document_and_nothing_else(launch: Launch) -> None:
    done = launch(*TORCHRUN, "--nproc-per-node=2", "-m", "dtprobe", "doctor", "--cluster", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert (data["schema"], data["healthy"], data["launcher"], data["world_size"]) == ("dtprobe.cluster/1", True, "torchrun", 2)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(10))
def test_a_healthy_job_of_four_has_no_problem_ten_times_of_ten(launch: Launch, number: int) -> None:
    done = launch(*TORCHRUN, "--nproc-per-node=4", "--no-python", *DOCTOR, "--json")
    assert (done.returncode, json.loads(done.stdout)["problems"]) == (0, []), done.stderr


@pytest.mark.nightly
@pytest.mark.needs("mpirun", "mpi4py")
def test_mpirun(launch: Launch) -> None:
    done = launch(*MPIRUN, "-n", "4", *DOCTOR, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(done.stdout)
    assert (data["launcher"], data["world_size"], len(data["links"])) == ("mpirun", 4, 6)
    assert all("Open MPI" in each["versions"]["mpi"] for each in data["ranks"])


@pytest.mark.nightly
def test_srun_over_two_nodes(launch: Launch, slurm: Any) -> None:
    done = launch("srun", "-N2", "-n4", *DOCTOR, "--json", extra=slurm.environ | {"MASTER_ADDR": "127.0.0.1"})
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(done.stdout)
    assert (data["launcher"], data["world_size"], data["problems"]) == ("slurm", 4, [])


@pytest.mark.nightly
def test_a_rank_that_srun_gives_another_variable_is_named(launch: Launch, slurm: Any, tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text('#!/bin/sh\nif [ "$SLURM_PROCID" = 3 ]; then ulimit -S -n 200; export NCCL_ALGO=Tree; fi\nexec "$@"\n')
    wrapper.chmod(0o755)
    extra = slurm.environ | {"MASTER_ADDR": "127.0.0.1"}
    done = launch("srun", "-N2", "-n4", str(wrapper), *DOCTOR, "--json", extra=extra)
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert only(data, "environment")["ranks"] == [3] and only(data, "nofile")["ranks"] == [3]


@pytest.mark.nightly
def test_without_a_launcher_it_says_so(launch: Launch) -> None:
    done = launch(*DOCTOR, "--json")
    data = json.loads(done.stdout)
    assert done.returncode == 0 and data["launcher"] == "single"
    assert [each["check"] for each in data["notes"]] == ["launcher"] and "torchrun" in data["notes"][0]["remedy"]


@pytest.mark.nightly
def test_what_does_not_go_together_is_a_usage_error(launch: Launch) -> None:
    for wrong in (["--out", "x"], ["--deadline-s", "9"], ["--cluster", "--leftovers"], ["--cluster", "--deadline-s", "1"]):
        done = launch("dtprobe", "doctor", *wrong)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr


FAULTS = {
    "nofile": ("resource:nofile,rank=1,limit=300", "nofile", [1], "nofile limit 300"),
    "shm": ("resource:shm,rank=2,limit=64M", "shm", [2], "/dev/shm has 64 MiB"),
    "variable": ("environment:set,rank=1,var=NCCL_IB_DISABLE,value=1", "environment", [1], "NCCL_IB_DISABLE: 1 on rank 1"),
    "clock": ("clock:skew,rank=2,seconds=7", "clock", [2], "7 s ahead"),
    "corrupt": ("collective:corrupt,rank=1,op=all_reduce,nth=3,where=output", "collectives", [1], "gave wrong values"),
}


@pytest.mark.nightly
@pytest.mark.needs("root", "libfaketime", "mount")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_from_outside_is_found_on_its_rank(launch: Launch, tmp_path: Path, fault: str) -> None:
    text, check, ranks, told = FAULTS[fault]
    job = [*TORCHRUN, "--nproc-per-node=3", "--no-python", *DOCTOR, "--out", str(tmp_path / "found")]
    launch("dtprobe", "inject", text, "--out", str(tmp_path / "runs"), "--", *job)
    data = json.loads((tmp_path / "found" / "cluster.json").read_text())
    found = only(data, check)
    assert told in found["found"] and found["remedy"]
    assert found["ranks"] == ranks


@pytest.mark.nightly
@pytest.mark.needs("root", "netns", "veth", "tc", "package:pyroute2")
def test_a_rank_behind_a_slow_cable_is_named_by_its_links(launch: Launch, tmp_path: Path) -> None:
    job = [*TORCHRUN, "--nproc-per-node=4", "--no-python", *DOCTOR, "--out", str(tmp_path / "found")]
    slow = "network:bandwidth,rank=2,mbit=50"
    launch("dtprobe", "inject", slow, "--out", str(tmp_path / "runs"), "--", *job)
    data = json.loads((tmp_path / "found" / "cluster.json").read_text())
    assert [(each["a"], each["b"]) for each in data["links"] if each["slow"]] == [(0, 2), (1, 2), (2, 3)]
    found = only(data, "links")
    assert found["ranks"] == [2] and "3 slow links have rank 2 in common" in found["found"]
    for each in data["links"]:
        if each["slow"]:
            assert (
                min(each["out_bytes_s"], each["back_bytes_s"]) < 50e6 / 8 * 2
            )  # the cable's bucket lets the first 64 KiB or so through at once


def ranks_of(process: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with_rank = {}
        try:
            with_rank = child.environ()
            if "doctor" in child.cmdline() and ("RANK" in with_rank or "OMPI_COMM_WORLD_RANK" in with_rank):
                found[int(with_rank.get("RANK") or with_rank["OMPI_COMM_WORLD_RANK"])] = child
        except psutil.Error:
            continue
    return found


@pytest.fixture
def midway(tmp_path: Path, environ: dict[str, str]) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Strike one rank of a running command with a signal while it measures links, and wait for the end."""
    started: list[tuple[subprocess.Popen[bytes], list[psutil.Process]]] = []

    def strike(command: list[str], victim: int, number: int) -> subprocess.CompletedProcess[str]:
        process = start(tmp_path, tuple(command), environ)
        struck: list[psutil.Process] = []
        started.append((process, struck))
        deadline = time.monotonic() + 120
        while not struck and process.poll() is None and time.monotonic() < deadline:
            each = ranks_of(process).get(victim)
            # joined: its gloo connections stand
            if each is not None and len([one for one in each.net_connections("tcp") if one.status == "ESTABLISHED"]) >= 4:
                each.send_signal(number)
                struck.append(each)
            time.sleep(0.05)
        assert struck, (tmp_path / "err").read_text()
        process.wait(120)
        return subprocess.CompletedProcess(
            command, process.returncode, (tmp_path / "out").read_text(), (tmp_path / "err").read_text()
        )

    yield strike
    for process, struck in started:
        for each in struck:
            if each.is_running():
                each.kill()
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.nightly
@pytest.mark.needs("mpirun", "mpi4py")
@pytest.mark.parametrize(
    "launcher", [[*TORCHRUN, "--nproc-per-node=3", "--no-python"], [*MPIRUN, "-n", "3"]], ids=["torchrun", "mpirun"]
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_struck_midway_is_named_although_the_launcher_ends_the_job(
    midway: Callable[..., subprocess.CompletedProcess[str]], launcher: list[str], number: int
) -> None:
    done = midway([*launcher, *DOCTOR, "--json", "--deadline-s", "20"], 1, number)
    assert done.returncode != 0
    if (
        number == signal.SIGKILL
    ):  # the launcher ends all ranks; mpirun leaves them a second, in which the report may not get done
        said = [line for line in done.stderr.splitlines() if line.startswith("dtprobe: while ")]
        assert len(said) == 1 and said[0].endswith("(SIGTERM); rank 1 no longer answered"), said or done.stderr
        if "{\n" not in done.stdout and launcher[0] == "mpirun":
            return
    data, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{\n") :])
    assert only(data, "ranks")["ranks"] == [1], done.stderr
    assert data["took_s"] < 20
