"""The torchrun launcher: a real torchrun, ranks without torch where torch does not matter."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dtprobe import processes
from dtprobe.confine import Confinement
from dtprobe.errors import DtprobeError
from dtprobe.launch import JobSpec
from dtprobe.launch.torchrun import Torchrun

pytestmark = pytest.mark.needs("torch")

PYTHON = (sys.executable, "-I", "-S", "-c")
PATIENCE_S = 120.0


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Confinement]:
    (tmp_path / "tmp").mkdir()
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path / "tmp")}
    with Confinement.open(f"test-{uuid.uuid4().hex[:12]}", environ=environ) as opened:
        yield opened
    assert processes.marked(opened.run_id) == [] and not list((tmp_path / "tmp").iterdir())


def job_spec(tmp_path: Path, program: str) -> JobSpec:
    return JobSpec(argv=(*PYTHON, program), env=dict(os.environ), world_size=2, folder=tmp_path / "arm", cwd=tmp_path)


def until(true: Callable[[], object]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_ranks_meet_have_their_folders_and_their_own_environment(box: Confinement, tmp_path: Path) -> None:
    program = (
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1); dist.all_reduce(x)\n"
        "print(x.item(), os.environ['RANK'], os.environ['WORD'], os.getpid(), os.environ['DTPROBE_RANK_FOLDER'])\n"
        "dist.destroy_process_group()\n"
    )
    spec = replace(
        job_spec(tmp_path, ""),
        argv=(sys.executable, "-c", program),
        environ=lambda rank: {"WORD": f"word{rank}"},
        wrap=lambda rank, argv: ("env", f"WRAPPED={rank}", *argv),
    )
    job = Torchrun().start(box, spec)
    assert [one.rank for one in job.processes()] == [None]
    job.release()
    exits = job.wait(PATIENCE_S)
    assert [(one.rank, one.exit_code, one.signal, one.timed_out) for one in exits] == [(0, 0, None, False), (1, 0, None, False)]
    assert all(one.cpu_s > 0 and one.wall_s > 0 for one in exits)
    assert job.agent_exit is not None and job.agent_exit.code == 0
    assert [one.rank for one in job.processes()] == [None, 0, 1]
    for rank in range(2):
        folder = tmp_path / "arm" / f"rank{rank}"
        process = json.loads((folder / "process.json").read_text())
        assert (process["rank"], process["attempt"], process["argv"][:2]) == (rank, 0, ["env", f"WRAPPED={rank}"])
        assert (folder / "stdout.log").read_text().split() == [
            "2.0",
            str(rank),
            f"word{rank}",
            str(process["pid"]),
            str(folder),
        ]


def test_restarts_keep_each_attempts_artifacts(box: Confinement, tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "sys.exit(3 if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)"
    )
    job = Torchrun(max_restarts=1).start(box, job_spec(tmp_path, program))
    job.release()
    assert [one.exit_code for one in job.wait(PATIENCE_S)] == [0, 0]
    folder = tmp_path / "arm" / "rank1"
    assert (folder / "stdout.log").read_text().split() == ["attempt", "1"]
    assert (folder / "attempt0" / "stdout.log").read_text().split() == ["attempt", "0"]
    assert json.loads((folder / "attempt0" / "exit.json").read_text())["code"] == 3
    assert json.loads((folder / "process.json").read_text())["attempt"] == 1


def test_what_the_harness_writes_to_stays_when_an_attempt_is_set_aside(box: Confinement, tmp_path: Path) -> None:
    program = "import os, sys; sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)"
    job = Torchrun(max_restarts=1).start(box, job_spec(tmp_path, program))
    with (tmp_path / "arm" / "rank0" / "proc.jsonl").open("w"):
        job.release()
        job.wait(PATIENCE_S)
    assert (tmp_path / "arm" / "rank0" / "proc.jsonl").exists()
    assert (tmp_path / "arm" / "rank0" / "attempt0" / "process.json").exists()


def test_a_signalled_rank_is_seen_as_such_by_torchrun_and_by_us(box: Confinement, tmp_path: Path) -> None:
    program = "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(600)"
    job = Torchrun().start(box, job_spec(tmp_path, program))
    job.release()
    exits = job.wait(PATIENCE_S)
    assert [(one.exit_code, one.signal) for one in exits] == [(None, signal.SIGTERM), (None, signal.SIGKILL)]
    assert job.agent_exit is not None and job.agent_exit.code == 1
    assert "exitcode  : -9" in (tmp_path / "arm" / "launcher" / "stderr.log").read_text()


def test_a_rank_dies_with_the_shim_that_torchrun_kills(box: Confinement, tmp_path: Path) -> None:
    job = Torchrun().start(box, job_spec(tmp_path, "import time; time.sleep(600)"))
    job.release()
    until(lambda: len(job.processes()) == 3)
    rank = job.processes()[1]
    found = processes.read(rank.pid)
    assert found is not None and found.session == rank.pid
    os.kill(found.ppid, signal.SIGKILL)
    exits = job.wait(PATIENCE_S)
    assert exits[0].signal == signal.SIGKILL


def test_the_deadline_ends_torchrun_with_its_ranks(box: Confinement, tmp_path: Path) -> None:
    job = Torchrun().start(box, job_spec(tmp_path, "import os, signal, time; os.kill(os.getpid(), signal.SIGSTOP)"))
    job.release()
    until(lambda: len(job.processes()) == 3)
    exits = job.wait(0.1)
    assert [(one.exit_code, one.signal, one.timed_out) for one in exits] == [(None, None, True)] * 2
    ended = job.end()
    assert [(one.signal, one.timed_out) for one in ended] == [(signal.SIGKILL, True)] * 2
    assert processes.descendants(box.warden_pid) == []


def test_a_missing_program_is_one_clear_line(box: Confinement, tmp_path: Path) -> None:
    with pytest.raises(DtprobeError, match="cannot execute /nowhere/x: No such file or directory"):
        Torchrun().start(box, replace(job_spec(tmp_path, ""), argv=("/nowhere/x",)))


def test_a_missing_recorder_in_front_fails_the_rank_with_a_clear_line(box: Confinement, tmp_path: Path) -> None:
    job = Torchrun().start(box, replace(job_spec(tmp_path, ""), wrap=lambda rank, argv: ("/nowhere/strace", *argv)))
    job.release()
    codes = {one.exit_code for one in job.wait(PATIENCE_S)}
    assert 127 in codes
    logs = [(tmp_path / "arm" / f"rank{rank}" / "stderr.log") for rank in range(2)]
    said = "".join(log.read_text() for log in logs if log.exists())
    assert "cannot execute /nowhere/strace: No such file or directory" in said
