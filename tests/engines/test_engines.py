"""The seam: names, tasks that cannot be, and the engine that is always there."""

from __future__ import annotations

import os

import pytest

from dtprobe.engines import Task, named
from dtprobe.engines.node import plain
from dtprobe.engines.slurm import Slurm
from dtprobe.errors import UsageError


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slrum", "no engine is called 'slrum'"),
        ("local:jobs=0", "no option jobs=0"),
        ("ray:adress=here:1", "no option adress=here:1"),
        ("ray:cpus=two", "no option cpus=two"),
        ("slurm:array=0-9", "array is not yours to set"),
        ("slurm:partition=a,partition=b", "'partition=b' is no option"),
        ("slurm:=main", "'=main' is no option"),
    ],
)
def test_an_engine_that_cannot_be_is_named(text, says):
    with pytest.raises(UsageError, match=says):
        named(text, {})


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "twice"])
def test_ids_that_are_no_names_of_files_or_not_unique_are_refused(name, tmp_path):
    tasks = [Task(id=one, argv=("--version",), timeout_s=9) for one in ("twice", name)]
    with pytest.raises(UsageError, match="ids are to be unique"):
        named("local", os.environ).run(tasks, into=tmp_path, ended=print)


def test_what_comes_from_elsewhere_than_a_task_s_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="does not lie in its own folder"):
        named("local", os.environ).run([Task(id="a", argv=(), timeout_s=9, brings="../.ssh")], into=tmp_path, ended=print)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slurm", "sbatch is not on PATH"),
        ("ray", "no Ray cluster is named"),
        ("ray:address=nowhere", "is no address of a Ray cluster"),
        ("ray:address=127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
@pytest.mark.needs("ray")
def test_an_engine_that_is_not_there_is_one_line_with_its_remedy(text, says, tmp_path):
    with pytest.raises(UsageError, match=says) as told:
        named(text, {"PATH": str(tmp_path)}).run([Task(id="a", argv=(), timeout_s=9)], into=tmp_path, ended=print)
    assert told.value.remedy and "\n" not in str(told.value)


def test_a_scenario_does_not_take_itself_for_a_rank_of_its_engine_s_job():
    given = {"SLURM_PROCID": "0", "SLURM_CONF": "/etc/slurm.conf", "RAY_JOB_ID": "1", "OMP_NUM_THREADS": "2", "HOME": "/h"}
    assert plain(given) == {"SLURM_CONF": "/etc/slurm.conf", "HOME": "/h"}
    assert plain({"OMP_NUM_THREADS": "2"}) == {"OMP_NUM_THREADS": "2"}


def test_options_go_to_sbatch_and_what_is_alone_has_its_node_for_itself():
    engine = Slurm.of({"partition": "main", "time": "30"}, {})
    together, alone = (Task(id=name, argv=(), timeout_s=100, alone=name == "b") for name in "ab")
    assert engine.arguments([together]) == ["--time=30", "--cpus-per-task=2", "--partition=main"]
    assert Slurm.of({}, {}).arguments([alone]) == ["--time=3", "--cpus-per-task=2", "--exclusive"]


def test_each_task_ends_once_and_what_it_left_comes_back_whole(tmp_path, ends):
    tasks = [
        Task(id="says", argv=("--version",), timeout_s=60),
        Task(id="wrong", argv=("run", "no-such", "--out", "runs"), timeout_s=60, brings="runs"),
        Task(id="leaves", argv=("watch", "--out", "runs", "--", "true"), timeout_s=60, brings="runs"),
        Task(id="late", argv=("--version",), timeout_s=0, alone=True),
    ]
    named("local:jobs=2", os.environ).run(tasks, into=tmp_path, ended=ends.append)
    assert ends.ids() == ["late", "leaves", "says", "wrong"] and ends[-1].task == "late"
    assert (ends.of("says").exit_code, ends.of("wrong").exit_code, ends.of("late").exit_code) == (0, 2, None)
    assert "no scenario is called" in ends.of("wrong").stderr and ends.of("late").problem == "it ran past its 0 s"
    assert ends.of("says").versions["dtprobe"] == ends.of("says").stdout.strip()
    assert [one.name for one in tmp_path.iterdir()] == ["leaves"] and list(tmp_path.glob("leaves/watch/*/run.json"))


def test_an_exception_of_the_caller_ends_what_runs(tmp_path):
    def ended(done):
        raise RuntimeError(done.task)

    tasks = [Task(id="first", argv=("--version",), timeout_s=60), Task(id="long", argv=_SLEEP, timeout_s=200)]
    with pytest.raises(RuntimeError, match="first"):
        named("local:jobs=2", os.environ).run(tasks, into=tmp_path, ended=ended)
    assert not list(tmp_path.iterdir())


_SLEEP = ("watch", "--out", "runs", "--", "sleep", "150")
