"""Lines of a restarted job are told apart by attempt, and the first attempt that failed by itself is the one that is judged."""

from __future__ import annotations

from pathlib import Path

from dtprobe.diagnose import diagnose, read
from dtprobe.diagnose.facts.restarted import attempts

FAILED = '[rank1]: Traceback (most recent call last):\n[rank1]:   File "a.py", line 3, in f\n[rank1]:     g()\n[rank1]: {}\n'
AGAIN = "I0505 10:00:00.000000 9 agent/server/api.py:900] [default] Worker group FAILED. 1/1 attempts left; will restart worker group\n"


def _folder(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / "job" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "job"


def test_words_of_a_restart_split_a_file(tmp_path):
    case = read([_folder(tmp_path, {"a": FAILED.format("KeyError: 1") + AGAIN + FAILED.format("IndexError: 2")})])
    known = attempts(case)
    assert known.several
    assert [known.of(line) for line in case.lines] == [0] * 4 + [1] * 5


def test_what_only_a_later_attempts_folder_holds_is_of_it_wherever_it_is_repeated(tmp_path):
    case = read(
        [
            _folder(
                tmp_path,
                {
                    "console": "[default0]:only in the second one\n[default0]:said in both of them\n",
                    "t/attempt_0/0/stdout.log": "said in both of them\n",
                    "t/attempt_1/0/stdout.log": "only in the second one\nsaid in both of them\n",
                },
            )
        ]
    )
    known = attempts(case)
    assert [known.of(line) for line in case.lines if line.artifact.name == "console"] == [1, 0]


def test_a_job_that_was_not_restarted_has_one_attempt(tmp_path):
    assert not attempts(read([_folder(tmp_path, {"a": FAILED.format("KeyError: 1")})])).several


def test_the_first_failure_of_its_own_counts_even_where_a_later_one_is_plainer(tmp_path):
    later = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    answer = diagnose([_folder(tmp_path, {"a": FAILED.format("KeyError: 1") + AGAIN + later})])
    assert (answer.failure_mode, answer.first_failing_rank) == ("python-exception-one-rank", 1)
    answer = diagnose([_folder(tmp_path, {"a": AGAIN + later})])
    assert answer.failure_mode.startswith("cuda-oom")
