"""What is not read is named, with its ranks and why: never silently absent, never an exception."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from flight_jobs import Look, edited, fsdp, run, without, write

from dtprobe.diagnose import diagnose
from dtprobe.diagnose.cut import parts
from dtprobe.engines import Done, Task
from dtprobe.errors import DtprobeError, UsageError

from .conftest import Inside, in_shares, told

ONE_A_FILE = 400


class Losing(Inside):
    """Tasks end as usual, but those that `loses` names end otherwise; what they left is `harm`ed."""

    def __init__(self, loses: Callable[[int], Done | None], harm: Callable[[Path], None] = lambda folder: None) -> None:
        self.loses, self.harm = loses, harm

    def run(self, tasks: Sequence[Task], *, into: Path, ended: Callable[[Done], None]) -> None:
        super().run(tasks, into=into, ended=lambda done: ended(self.loses(int(done.task[-4:])) or done))
        self.harm(into)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Rank 6 of eight leaves out a call; logs of all."""
    made = edited(fsdp(8, 4), 6, without(11))
    write(tmp_path / "job", made, run(made), Look())
    for rank in range(8):
        (tmp_path / "job" / f"worker{rank}.log").write_text(f"2025-03-03 10:00:00 [rank{rank}]: step 3\n" * 20)
    return tmp_path / "job"


def lost(job: Path, engine: Inside) -> list[str]:
    """What is missing of it with a share a file: the eight logs, then the eight dumps."""
    answer = in_shares([job], job.parent, ONE_A_FILE, engine)
    assert answer.json["read"] == {"flight-recorder": 8, "text": 8}
    return list(answer.missing)


def test_a_task_that_its_engine_gives_up_is_named_with_its_files_ranks_and_the_reason(job: Path) -> None:
    gone = Done(task="", exit_code=None, host="n7", problem="its node n7 vanished, begun 3 times")

    def lose(number: int) -> Done | None:
        return Done(**{**vars(gone), "task": f"share-{number:04}"}) if number in (2, 9, 10) else None

    missing = lost(job, Losing(lose))
    assert "worker2.log: rank 2: not read: its node n7 vanished, begun 3 times" in missing
    assert "nccl_trace_rank_1: rank 1: not read: its node n7 vanished, begun 3 times" in missing
    assert "ranks 1, 2: dumps of the flight recorder were not read" in missing
    assert not [one for one in missing if "no flight recorder dump" in one]  # their dumps are there
    whole = diagnose([job])
    assert set(whole.missing) <= set(missing) and whole.first_failing_rank == 6
    found = in_shares([job], job.parent, ONE_A_FILE, Losing(lose))
    assert (found.failure_mode, found.first_failing_rank) == (whole.failure_mode, 6)


def test_ranks_whose_dumps_were_not_read_are_not_taken_for_absent_ones(job: Path) -> None:
    def lose(number: int) -> Done | None:
        return Done(task=f"share-{number:04}", exit_code=3, stderr="dtprobe: no space left\n") if number == 14 else None

    answer = in_shares([job], job.parent, ONE_A_FILE, Losing(lose))
    assert "nccl_trace_rank_6: rank 6: not read: no space left" in " ".join(answer.missing)
    assert "rank 6: dumps of the flight recorder were not read" in answer.missing


def test_a_task_that_was_killed_is_run_again(job: Path) -> None:
    seen: list[int] = []

    def once(number: int) -> Done | None:
        seen.append(number)
        return Done(task=f"share-{number:04}", exit_code=-9) if number == 3 and seen.count(3) == 1 else None

    def always(number: int) -> Done | None:
        return Done(task=f"share-{number:04}", exit_code=-9, host="n1") if number == 3 else None

    assert told(in_shares([job], job.parent, ONE_A_FILE, Losing(once))) == told(diagnose([job])) and seen.count(3) == 2
    assert "worker3.log: rank 3: not read: its task ended by signal 9 (Killed), twice (on n1)" in lost(job, Losing(always))


def test_where_nothing_was_read_the_reason_is_one_line(job: Path) -> None:
    away = "dtprobe: /srv/job is not there on n1; put the artifacts where all nodes see them under the same path\n"
    for code, kind in ((2, UsageError), (3, DtprobeError)):
        with pytest.raises(DtprobeError, match="--on inside: nothing was read: /srv/job is not there on n1; put") as told:
            lost(job, Losing(lambda number, code=code: Done(task=f"share-{number:04}", exit_code=code, stderr=away)))
        assert type(told.value) is kind and "\n" not in str(told.value)
    assert [one.name for one in job.parent.iterdir()] == ["job"]


@pytest.mark.parametrize("file", [parts.LINES, parts.DUMPS])
def test_what_comes_back_cut_anywhere_of_another_share_or_not_at_all_is_named(job: Path, file: str) -> None:
    whole = told(diagnose([job]))
    share = "share-0000" if file == parts.LINES else "share-0001"

    def harmed(harm: Callable[[Path], None]) -> str:
        return told(in_shares([job], job.parent, 2, Losing(lambda number: None, lambda into: harm(into / share / file))))

    size = 0

    def measure(path: Path) -> None:
        nonlocal size
        size = path.stat().st_size

    assert harmed(measure) == whole and size > 500
    for length in (0, 1, size // 9, size // 3, size // 2, size - 20, size - 9, size - 1):
        answer = harmed(lambda path, length=length: path.write_bytes(path.read_bytes()[:length]))
        assert (answer == whole and length >= size - 9) or f"what came back cannot be read: {file}" in answer, length
    assert f"what came back cannot be read: {file}" in harmed(Path.unlink)
    other = "share-0001" if share == "share-0000" else "share-0000"
    swapped = harmed(lambda path: path.write_bytes((path.parent.parent / other / file).read_bytes()))
    assert f"{file} is of another version or share" in swapped
