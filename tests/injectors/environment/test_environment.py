"""Variables as the victim sees them, on the ranks that are meant only, under a foreign launcher and our own."""

from __future__ import annotations

import sys

import pytest

from dtprobe import catalog
from dtprobe.inject.spec import parse

KNOWN = catalog.injectors()[0]
SEE = "say(*(os.environ.get(name, '-') for name in ('NCCL_DEBUG', 'RANK', 'WORLD_SIZE', 'SLURM_PROCID', 'SLURM_NTASKS')))"


def test_a_rank_of_somebody_s_command_sees_the_value_and_the_other_does_not(job):
    job.run("environment:set,rank=1,var=NCCL_DEBUG,value=INFO=2", job.command(SEE))
    assert (job.said(0), job.said(1)) == (["- 0 2 - -"], ["INFO=2 1 2 - -"])
    assert job.where() == [(1, None)]


def test_under_our_own_launcher_too_without_a_hook(job):
    job.run_local(
        "environment:set,rank=1,var=RANK,value=0",
        SEE + "\nif rank == 0: until(lambda: len(open(shared / 'said-0').readlines()) == 2)",
    )
    assert job.said(0) == ["- 0 2 - -", "- 0 2 - -"] and job.said(1) == [], "both believe that they are rank 0"
    assert job.where() == [(1, None)]


def test_without_a_rank_it_is_for_all_and_for_a_command_without_ranks(job):
    code = "import os; print(os.environ['NCCL_DEBUG'], flush=True)"
    job.run("environment:set,var=NCCL_DEBUG,value=WARN", [sys.executable, "-I", "-c", code])
    assert job.log("launcher/stdout.log") == "WARN\n" and job.where() == [(None, None)]
    job.run("environment:set,var=NCCL_DEBUG,value=WARN", job.command(SEE))
    assert (job.said(0), job.said(1)) == (["WARN 0 2 - -"], ["WARN 1 2 - -"])
    assert sorted(job.where(), key=str) == [(0, None), (1, None), (None, None)]


def test_what_a_launcher_sets_can_be_missing_in_one_rank(job):
    job.run(
        "environment:unset,rank=1,var=RANK+WORLD_SIZE", job.command("say(os.environ.get('RANK'), os.environ.get('WORLD_SIZE'))")
    )
    assert sorted(job.said(0)) == ["0 2", "None None"]  # without a rank it says so as rank 0, and either may be first
    assert job.where() == [(1, None)]


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("pretend,of=slurm", ["- 0 2 0 2", "- 1 2 1 2"]),
        ("contradict,of=slurm", ["- 0 2 1 2", "- 1 2 0 2"]),
        ("contradict,of=slurm,wrong=world_size", ["- 0 2 0 3", "- 1 2 1 3"]),
    ],
)
@pytest.mark.parametrize("local", [False, True])
def test_the_variables_of_a_launcher_agree_or_contradict(job, action, expected, local):
    if local:
        job.run_local(f"environment:{action}", SEE)
    else:
        job.run(f"environment:{action}", job.command(SEE))
    assert [job.said(0), job.said(1)] == [[line] for line in expected]
    assert sorted(job.where()) == [(0, None), (1, None)]


def test_the_variables_of_a_launcher_can_be_cleared(job):
    job.extra = {"SLURM_PROCID": "7", "SLURM_NTASKS": "9", "NCCL_DEBUG": "kept"}
    job.run("environment:clear,rank=1,of=slurm", job.command(SEE))
    assert (job.said(0), job.said(1)) == (["kept 0 2 7 9"], ["kept 1 2 - -"])


def test_faults_on_one_rank_add_up(job):
    texts = ["environment:set,rank=0,var=NCCL_DEBUG,value=A", "environment:pretend,rank=0,of=slurm"]
    job.run(texts, job.command(SEE))
    assert (job.said(0), job.said(1)) == (["A 0 2 0 2"], ["- 1 2 - -"])
    assert (job.where(0), job.where(1)) == ([(0, None)], [(0, None)])


def test_the_program_is_started_as_it_was(job):
    """Arguments, options of the interpreter, standard streams and the pid are the ones that the launcher gave."""
    code = "import os, sys; print(os.environ['A'], os.getpid(), os.environ['FIRST'], sys.argv, sys.flags.optimize, sys.stdin.read(), flush=True)"
    launcher = (
        "import os, subprocess, sys; "
        f"subprocess.run([sys.executable, '-O', '-c', {code!r}, 'x y', ''], input='in', text=True, env=os.environ | {{'RANK': '0', 'FIRST': '1'}})"
    )
    job.run("environment:set,rank=0,var=A,value=b", [sys.executable, "-I", "-c", launcher])
    words = job.log("launcher/stdout.log").split(maxsplit=2)
    assert not list((job.record.folder / "rank0").glob("process-*.json")), "it is the same attempt"
    assert words[0] == "b" and words[2] == "1 ['-c', 'x y', ''] 1 in\n"


def test_a_rank_without_python_is_not_reached_and_no_firing_is_claimed(job):
    job.run("environment:set,rank=1,var=A,value=b", job.launching("sleep", "0.1"))
    assert job.where() == [] and "no rank that is meant ran Python" in job.problems()


def test_a_killed_harness_leaves_nothing(job, killed):
    argv = job.command("say('up')\nuntil(lambda: False)")
    killed(["environment:set,rank=1,var=A,value=b", "--", *argv], lambda: job.said(1))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("environment:set,var=A", "needs value"),
        ("environment:set,var=A B,value=1", "no name of a variable"),
        ("environment:unset,var=PYTHONPATH", "harness's own hook"),
        ("environment:pretend,of=slrum", "did you mean slurm"),
        ("environment:set,var=A,value=1,nth=2", "cannot aim by nth"),
    ],
)
def test_what_cannot_be_is_one_line(fault, words):
    with pytest.raises(catalog.UsageError) as told:
        parse(fault, KNOWN)
    assert words in str(told.value) and "\n" not in str(told.value)


def test_bad_input_ends_with_2_and_nothing_is_started(job):
    assert "did you mean slurm" in job.refused("environment:pretend,of=slrum")
