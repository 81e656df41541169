"""How processes ended, whoever reports it."""

from __future__ import annotations

import pytest

from dtprobe.diagnose.facts.ends import ends

TABLE = [
    "[1]:",
    "  time      : 2025-03-18_07:41:22",
    "  host      : n7",
    "  rank      : 9 (local_rank: 1)",
    "  exitcode  : -9 (pid: 71)",
    "  error_file: <N/A>",
    "  traceback : Signal 9 (SIGKILL) received by PID 71",
]


def test_a_row_of_elastics_table_is_joined_from_its_lines(case):
    (one,) = ends(case(*TABLE))
    assert (one.rank, one.local_rank, one.code, one.pid, one.host) == (9, 1, -9, 71, "n7")


def test_what_the_launcher_killed_itself_is_forced(case):
    forced = "W0318 agent Unable to shutdown process 71 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL"
    (one,) = ends(case(forced, *TABLE))
    assert one.forced


@pytest.mark.parametrize(
    ("line", "rank", "code"),
    [
        ("srun: error: gn031: task 5: Killed", 5, -9),
        ("srun: error: a-1: task 3: Segmentation fault (core dumped)", 3, -11),
        ("mpirun noticed that process rank 2 with PID 0 on node b7 exited on signal 11 (Segmentation fault).", 2, -11),
        ("torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL", 1, -9),
        ("Process 4 exit with status code 137.", 4, -9),
        ("launcher: rank 6 exit code 1", 6, 1),
        (
            "subprocess.CalledProcessError: Command '['python', '-u', 'm.py', '--local_rank=3']' died with <Signals.SIGSEGV: 11>.",
            3,
            -11,
        ),
        ("[ERROR] [launch.py:325] ['python', 'f.py', '--local_rank=5'] exits with return code = -9", 5, -9),
    ],
)
def test_launchers_say_it_in_many_ways(case, line, rank, code):
    assert [(one.rank, one.code) for one in ends(case(line))] == [(rank, code)]


def test_a_range_of_tasks_is_every_one_of_them(case):
    found = ends(case("srun: error: gn031: tasks 0-2,7: Exited with exit code 1"))
    assert [one.rank for one in found] == [0, 1, 2, 7]


def test_codes_on_one_line_belong_to_the_rank_before_each(case):
    assert [(one.rank, one.code) for one in ends(case("exit codes: rank0=0 rank1=134"))] == [(0, 0), (1, -6)]
