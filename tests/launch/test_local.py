"""The local launcher with real processes: placement, folders, deadlines, failures."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dtprobe import processes
from dtprobe.confine import Confinement
from dtprobe.errors import DtprobeError, UsageError
from dtprobe.launch import JobSpec, ReservedPort, named
from dtprobe.launch.local import Local

PYTHON = (sys.executable, "-I", "-S", "-c")
PATIENCE_S = 30.0


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Confinement]:
    (tmp_path / "tmp").mkdir()
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path / "tmp")}
    with Confinement.open(f"test-{uuid.uuid4().hex[:12]}", environ=environ) as opened:
        yield opened
    assert processes.marked(opened.run_id) == [] and not list((tmp_path / "tmp").iterdir())


def job_spec(tmp_path: Path, program: str, world_size: int = 2, **env: str) -> JobSpec:
    return JobSpec(
        argv=(*PYTHON, program), env={**os.environ, **env}, world_size=world_size, folder=tmp_path / "arm", cwd=tmp_path
    )


def output(tmp_path: Path, rank: int, name: str = "stdout.log") -> str:
    return (tmp_path / "arm" / f"rank{rank}" / name).read_text()


def test_each_rank_gets_its_place(box: Confinement, tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME OMP_NUM_THREADS TMPDIR"
    program = f"import json, os; print(json.dumps({{name: os.environ[name] for name in '''{names}'''.split()}}))"
    job = Local().start(box, job_spec(tmp_path, program, world_size=3))
    job.release()
    exits = job.wait(PATIENCE_S)
    assert [(one.rank, one.exit_code, one.timed_out) for one in exits] == [(rank, 0, False) for rank in range(3)]
    said = [json.loads(output(tmp_path, rank)) for rank in range(3)]
    assert [one["RANK"] for one in said] == [one["LOCAL_RANK"] for one in said] == ["0", "1", "2"]
    assert len({one["MASTER_PORT"] for one in said}) == 1
    assert {
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(box.scratch),
    }.items() <= said[0].items()


def test_a_surrounding_launchers_placement_does_not_leak_in_and_defaults_can_be_set(box: Confinement, tmp_path: Path) -> None:
    program = "import os; print(os.environ['RANK'], os.environ['OMP_NUM_THREADS'], 'TORCHELASTIC_RUN_ID' in os.environ)"
    job = Local().start(box, job_spec(tmp_path, program, RANK="7", TORCHELASTIC_RUN_ID="x", OMP_NUM_THREADS="2"))
    job.release()
    job.wait(PATIENCE_S)
    assert output(tmp_path, 1).split() == ["1", "2", "False"]


def test_wrap_and_environ_are_per_rank_and_the_pid_is_known_before_the_program(box: Confinement, tmp_path: Path) -> None:
    spec = replace(
        job_spec(tmp_path, "import os, sys; print(os.getpid(), os.environ['WORD'], os.environ['RANK'], sys.argv[1:])"),
        wrap=lambda rank, argv: ("env", f"WORD=wrapped{rank}", *argv, str(rank)),
        environ=lambda rank: {"RANK": "9"} if rank else {},
    )
    job = Local().start(box, spec)
    known = {one.rank: one.pid for one in job.processes()}
    for rank, pid in known.items():
        process = json.loads(output(tmp_path, rank, "process.json"))
        assert (process["rank"], process["pid"], process["argv"][0]) == (rank, pid, "env")
    assert output(tmp_path, 0) == ""
    job.release()
    job.wait(PATIENCE_S)
    assert output(tmp_path, 0).split(maxsplit=3) == [str(known[0]), "wrapped0", "0", "['0']\n"]
    assert output(tmp_path, 1).split(maxsplit=3) == [str(known[1]), "wrapped1", "9", "['1']\n"]


def test_the_deadline_marks_who_still_runs_and_end_ends_them(box: Confinement, tmp_path: Path) -> None:
    program = "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGSTOP)"
    job = Local().start(box, job_spec(tmp_path, program))
    job.release()
    ticks: list[int] = []
    exits = job.wait(0.3, tick=lambda: ticks.append(1))
    assert ticks
    assert [(one.exit_code, one.signal, one.timed_out) for one in exits] == [(0, None, False), (None, None, True)]
    assert processes.read(job.processes()[1].pid) is not None  # recorders may still look at it
    ended = job.end()
    assert [(one.exit_code, one.signal, one.timed_out) for one in ended] == [(0, None, False), (None, signal.SIGKILL, True)]
    assert processes.read(job.processes()[1].pid) is None


def test_a_worker_that_crashes_at_import_says_so_in_its_own_log(box: Confinement, tmp_path: Path) -> None:
    job = Local().start(box, job_spec(tmp_path, "import no_such_module_anywhere"))
    job.release()
    assert [one.exit_code for one in job.wait(PATIENCE_S)] == [1, 1]
    assert "ModuleNotFoundError" in output(tmp_path, 0, "stderr.log")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("/nowhere/program", "cannot execute /nowhere/program: No such file or directory"),
        ("./plain", "cannot execute ./plain: Permission denied"),
        ("no-such-program-anywhere", "cannot execute no-such-program-anywhere: No such file or directory"),
    ],
)
def test_a_missing_program_is_one_clear_line_even_behind_a_recorder(
    box: Confinement, tmp_path: Path, program: str, message: str
) -> None:
    (tmp_path / "plain").touch()
    spec = replace(job_spec(tmp_path, ""), argv=(program,), wrap=lambda rank, argv: ("env", *argv))
    with pytest.raises(DtprobeError) as raised:
        Local().start(box, spec)
    assert str(raised.value) == message


def test_a_missing_recorder_in_front_is_one_clear_line_and_leaves_no_rank(box: Confinement, tmp_path: Path) -> None:
    spec = replace(job_spec(tmp_path, "import time; time.sleep(600)"), wrap=lambda rank, argv: ("/nowhere/strace", *argv))
    job = Local().start(box, spec)
    with pytest.raises(DtprobeError, match="cannot execute /nowhere/strace: No such file"):
        job.release()
    assert [one.rank for one in job.end()] == [0, 1]
    assert processes.descendants(box.warden_pid) == []


def test_a_rank_folder_that_cannot_be_written_leaves_no_rank(box: Confinement, tmp_path: Path) -> None:
    (tmp_path / "arm" / "rank1" / "stderr.log").mkdir(parents=True)
    with pytest.raises(DtprobeError, match=r"cannot open .*rank1/stderr.log: Is a directory"):
        Local().start(box, job_spec(tmp_path, ""))
    assert processes.descendants(box.warden_pid) == []


def test_two_jobs_in_one_confinement_do_not_meet(box: Confinement, tmp_path: Path) -> None:
    program = "import os; print(os.environ['MASTER_PORT'])"
    for arm in ("one", "two"):
        job = Local().start(box, replace(job_spec(tmp_path, program), folder=tmp_path / arm))
        job.release()
        assert [one.exit_code for one in job.wait(PATIENCE_S)] == [0, 0]
        job.end()
    assert (tmp_path / "one" / "rank0" / "stdout.log").read_text().strip()
    assert (tmp_path / "two" / "rank0" / "stdout.log").read_text().strip()


def test_a_reserved_port_is_refused_to_strangers_and_open_to_the_jobs_store() -> None:
    port = ReservedPort()
    try:
        for address in ("127.0.0.1", "127.0.0.2", "0.0.0.0"):
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind((address, port.number))
        others = [ReservedPort() for _ in range(50)]
        assert port.number not in {other.number for other in others}
        for other in others:
            other.close()
        for address in ("127.0.0.1", "0.0.0.0"):
            with socket.socket() as store:
                store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                store.bind((address, port.number))
                store.listen()
                with socket.create_connection(("127.0.0.1", port.number), timeout=PATIENCE_S):
                    store.accept()[0].close()
    finally:
        port.close()


@pytest.mark.needs("torch")
def test_ranks_meet_over_gloo(box: Confinement, tmp_path: Path) -> None:
    program = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1); dist.all_reduce(x); print(x.item())\n"
        "dist.destroy_process_group()\n"
    )
    spec = replace(job_spec(tmp_path, ""), argv=(sys.executable, "-c", program))
    job = Local().start(box, spec)
    job.release()
    assert [one.exit_code for one in job.wait(120)] == [0, 0]
    assert [output(tmp_path, rank).strip() for rank in range(2)] == ["2.0", "2.0"]


def test_an_unknown_launcher_is_named_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"no launcher 'warp'; there are local, torchrun"):
        named("warp")
    assert named("local").probe() is None
