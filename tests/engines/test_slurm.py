"""Tasks on a real Slurm of two nodes: each exactly once, whatever becomes of its nodes or of us."""

from __future__ import annotations

import signal
import subprocess
import threading

import pytest

from dtprobe.engines import Task, named
from dtprobe.errors import DtprobeError

from .conftest import held, lasting, lose, sleeping, slurmd, spread, with_signal, within

pytestmark = [pytest.mark.needs("slurm", "root")]


def jobs(env):
    said = subprocess.run(
        ["squeue", "-h", "-r", "-o", "%i %T %N"], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return said.stdout.splitlines()


def test_each_task_ends_once_and_what_it_left_comes_back_whole(slurm, tmp_path, ends):
    tasks = [
        Task(id="says", argv=("--version",), timeout_s=60),
        Task(id="leaves:it", argv=("watch", "--out", "runs", "--", "true"), timeout_s=60, brings="runs", alone=True),
        Task(id="late", argv=("watch", "--", "sleep", "149"), timeout_s=0),
    ]
    named("slurm:partition=main", slurm).run(tasks, into=tmp_path, ended=ends.append)
    assert ends.ids() == ["late", "leaves:it", "says"]
    assert ends.of("says").exit_code == 0 and ends.of("says").host in ("node1", "node2")
    assert ends.of("late").problem == "it ran past its 0 s"
    assert [one.name for one in tmp_path.iterdir()] == ["leaves:it"] and list(tmp_path.glob("leaves:it/watch/*/run.json"))
    with pytest.raises(DtprobeError, match=r"sbatch refused: .*partition=nowhere"):
        named("slurm:partition=nowhere", slurm).run(tasks, into=tmp_path, ended=ends.append)
    assert not jobs(slurm) and not held(tmp_path)


@pytest.mark.nightly
def test_a_job_that_somebody_cancels_is_said_to_be_and_not_begun_again(slurm, tmp_path, ends):
    def cancel():
        within(60, "the task to be cancelled", lambda: sleeping(167))
        (line,) = jobs(slurm)
        subprocess.run(["scancel", line.split()[0]], env=slurm, check=True, timeout=60)

    canceller = threading.Thread(target=cancel)
    canceller.start()
    named("slurm", slurm).run([lasting("cancelled", 167)], into=tmp_path, ended=ends.append)
    canceller.join()
    assert "ended as CANCELLED" in ends.of("cancelled").problem and ends.of("cancelled").attempts == 1


@pytest.mark.nightly
@pytest.mark.parametrize("whole", [True, False])
def test_a_node_that_vanishes_loses_and_doubles_nothing(slurm, tmp_path, ends, whole):
    """Whole: with all that ran on it. Otherwise its daemon alone: what it had begun goes on beside its second attempt."""
    tasks = [lasting(f"t{k}", 45) for k in range(4)]

    def vanish():
        within(90, "all tasks at work", lambda: len(sleeping(45)) == 4)
        if whole:
            lose(slurm, "node1")
        else:
            for one in slurmd(slurm, "node1"):
                with_signal(one, signal.SIGKILL)

    vanisher = threading.Thread(target=vanish)
    vanisher.start()
    named("slurm", slurm).run(tasks, into=tmp_path, ended=ends.append)
    vanisher.join()
    assert ends.ids() == ["t0", "t1", "t2", "t3"] and all(one.exit_code == 0 for one in ends), ends
    assert any(one.attempts == 2 for one in ends)
    assert not whole or {one.host for one in ends} == {"node2"}
    for task in tasks:
        assert len(list(tmp_path.glob(f"{task.id}/watch/*/run.json"))) == 1
    within(60, "nothing left", lambda: not held(tmp_path))


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_an_interrupt_cancels_the_jobs(slurm, tmp_path, signum):
    ours = spread(slurm, "slurm", [lasting(f"t{k}", 150) for k in range(6)], tmp_path)
    within(60, "tasks at work", lambda: len(sleeping(150)) >= 2)
    ours.send_signal(signum)
    said, _ = ours.communicate(timeout=90)
    assert ours.returncode != 0 and not said
    assert not jobs(slurm) and not list(tmp_path.iterdir())
    within(30, "nothing left", lambda: not held(tmp_path))


@pytest.mark.nightly
def test_after_a_kill_of_ours_the_next_spread_takes_what_it_wants_and_cancels_the_rest(slurm, tmp_path, ends):
    before = [lasting("wanted", 20), lasting("unwanted", 151), lasting("changed", 152)]
    ours = spread(slurm, "slurm", before, tmp_path)
    within(60, "tasks at work", lambda: sleeping(20) and sleeping(151) and sleeping(152))
    ours.kill()
    ours.communicate(timeout=30)
    named("slurm", slurm).run([before[0], lasting("changed", 1)], into=tmp_path, ended=ends.append)
    assert ends.ids() == ["changed", "wanted"] and all((one.exit_code, one.attempts) == (0, 1) for one in ends)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["changed", "wanted"]
    within(30, "nothing left", lambda: not jobs(slurm) and not held(tmp_path))
