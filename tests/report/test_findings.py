"""What counts as decisive evidence: endings, partings, stacks, counts that differ, telling lines."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from dtprobe.report import findings, output
from dtprobe.report.load import load


def test_ranks_that_always_ended_alike_share_a_row(tmp_path: Path, samples: ModuleType) -> None:
    rows = [
        (row.arm, row.who, row.ending, f"{row.count} of {row.of}", row.bad)
        for row in findings.outcomes(load(samples.skipped(tmp_path)))
    ]
    assert rows == [
        ("control", "ranks 0-3", "exit 0", "3 of 3", False),
        ("fault", "ranks 0, 2, 3", "exit 1", "3 of 3", True),
        ("fault", "rank 1", "exit 0", "3 of 3", False),
        ("mitigated", "ranks 0-3", "exit 1", "3 of 3", True),
    ]


def test_the_rank_that_never_entered_is_named_with_who_waits(tmp_path: Path, samples: ModuleType) -> None:
    fault, _mitigated = findings.partings(load(samples.skipped(tmp_path)))
    assert fault.sentence == "In group default_pg, rank 1 never entered all_reduce #5; ranks 0, 2, 3 waited there."
    behind = {row.rank: (row.entered, row.state, row.behind) for row in fault.rows}
    assert behind[1] == ("all_reduce #4", "done", 1)
    assert behind[0] == ("all_reduce #5", "waiting", 0)
    assert {row.place.href for row in fault.rows} == {f"fault/2/rank{rank}/fr-0.json" for rank in range(4)}


@pytest.mark.parametrize(
    ("ops", "retired", "told"),
    [
        (
            ("all_reduce", "broadcast"),
            False,
            "In group 0 the ranks met with different operations: all_reduce #1 and broadcast #1.",
        ),
        (("all_reduce", "all_reduce"), False, "In group 0 every rank entered all_reduce #1, and ranks 0, 1 waited in it."),
    ],
)
def test_a_mismatch_and_a_symmetric_hang_are_told_apart(
    tmp_path: Path, samples: ModuleType, ops: tuple[str, str], retired: bool, told: str
) -> None:
    made = samples.Made(tmp_path, "meet")
    run = made.arm_run("fault", 2, at_s=0, wall_s=[4.0, 4.0], exits=[1, 1])
    for rank, op in enumerate(ops):
        made.row("collectives", run, rank, 2.0, "fr.json", kind="collective", group="0", op=op, seq=1, op_id=1, retired=retired)
    (parting,) = findings.partings(load(made.write()))
    assert parting.sentence == told


def test_a_hang_is_told_as_it_was_when_suspected_whatever_the_last_dump_says(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "late")
    run = made.arm_run("fault", 2, at_s=0, wall_s=[12.0] * 3, exits=[1, 1, 1])
    run["suspected"] = [{"t_ns": run["started_ns"] + 5 * samples.SECOND, "reason": "open for 3 s"}]
    for dump in range(2):
        for rank in range(3):
            for seq, at_s in ((1, 1.0), (2, 9.0 if rank == 1 else 2.0)):
                if dump == 1 or at_s < 5:
                    made.row(
                        "collectives", run, rank, at_s, f"fr-{dump}.json", kind="collective", group="7", group_desc="undefined", op="all_reduce",
                        seq=seq, op_id=seq, state="scheduled", retired=dump == 1 or seq == 1,
                    )  # fmt: skip
    (parting,) = findings.partings(load(made.write()))
    assert (
        parting.sentence
        == "In group 7, rank 1 came to all_reduce #2 only 4 s after the hang was suspected; ranks 0, 2 waited there."
    )
    assert {row.place.text for row in parting.rows} == {f"fault/2/rank{rank}/fr-0.json" for rank in range(3)}
    assert [(row.entered, row.state) for row in parting.rows] == [
        ("all_reduce #2", "waiting"),
        ("all_reduce #1", "done"),
        ("all_reduce #2", "waiting"),
    ]


def test_in_a_healthy_run_a_rank_recorded_earlier_than_another_is_no_finding(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "healthy")
    run = made.arm_run("control", 2, at_s=0, wall_s=[4.0, 4.0], exits=[0, 0])
    run["suspected"] = [{"t_ns": run["started_ns"] + samples.SECOND, "reason": "slow machine"}]
    for rank in range(2):
        for seq in range(1, 10 - rank):
            made.row(
                "collectives",
                run,
                rank,
                seq / 10,
                "fr.json",
                kind="collective",
                group="0",
                op="all_reduce",
                seq=seq,
                op_id=seq,
                retired=True,
            )
    assert findings.partings(load(made.write())) == ()


def test_an_injection_that_never_fired_is_said(tmp_path: Path, samples: ModuleType) -> None:
    rows = [(row.fault, row.count, row.where) for row in findings.injected(load(samples.injection(tmp_path)))]
    assert rows == [
        ("collective:delay,rank=1,nth=3,seconds=1", 1, "rank 1, all_reduce #3, after 4 s"),
        ("process:kill,rank=0,after_s=7", 1, "rank 0, after 7 s, SIGKILL to pid 4000"),
        ("collective:skip,rank=1,nth=900", 0, ""),
    ]


def test_bare_runs_are_no_part_of_the_control_arm(tmp_path: Path, samples: ModuleType) -> None:
    rows = [(row.arm, row.who, row.ending, row.of) for row in findings.outcomes(load(samples.leak(tmp_path)))]
    assert rows == [(arm, "ranks 0, 1", "exit 0", 3) for arm in ("control", "fault", "mitigated")]


def test_ranks_that_came_equally_far_and_finished_are_no_finding(tmp_path: Path, samples: ModuleType) -> None:
    assert findings.partings(load(samples.leak(tmp_path))) == ()


def test_equal_stacks_are_one_and_the_minority_comes_first(tmp_path: Path, samples: ModuleType) -> None:
    few, many = findings.stacks(load(samples.skipped(tmp_path)))
    assert (few.who, few.minority, few.top) == ("rank 1", True, "loader.next (worker.py:71)")
    assert (many.who, many.minority, many.count, len(many.frames)) == ("ranks 0, 2, 3", False, 3, 4)
    assert few.places[0].href == "fault/2/rank1/pyspy-0.json"


def test_with_two_ranks_at_two_places_neither_is_a_minority(tmp_path: Path, samples: ModuleType) -> None:
    assert [stack.minority for stack in findings.stacks(load(samples.skipped(tmp_path, world_size=2)))] == [False, False]


def test_only_calls_whose_counts_differ_are_shown_with_their_artifacts(tmp_path: Path, samples: ModuleType) -> None:
    table = next(table for table in findings.tables(load(samples.leak(tmp_path))) if table.name == "syscalls")
    assert table.rows == (("clone3", "16", "124", "16"),)
    assert table.arms == ("control", "fault", "mitigated")
    assert "fault/2/rank0/strace.txt" in [place.href for place in table.places]


def test_exceptions_come_before_symptoms_and_equal_lines_once_with_what_led_to_them(
    tmp_path: Path, samples: ModuleType
) -> None:
    fault, mitigated = output.lines(load(samples.skipped(tmp_path)))
    assert (fault.arm, fault.who, fault.count, fault.place.href, fault.place.line) == (
        "fault",
        "ranks 0, 2, 3",
        9,
        "fault/0/rank0/stderr.log",
        3,
    )
    assert fault.before == ("Traceback (most recent call last):", '  File "worker.py", line 44, in step')
    assert "SkippedCollective" in mitigated.text


def test_without_a_frame_the_end_of_the_raw_file_is_read(tmp_path: Path, samples: ModuleType) -> None:
    folder = samples.skipped(tmp_path)
    (folder / "frames" / "log_lines.parquet").unlink()
    with (folder / "fault" / "0" / "rank0" / "stderr.log").open("wb") as file:
        file.write(b"\xff\x00 noise\n" * 100_000 + b"ValueError: at the very end\n")
    lines = output.lines(load(folder))
    long = next(line for line in lines if "at the very end" in line.text)
    assert (long.place.href, long.place.line) == ("fault/0/rank0/stderr.log", None)
    assert any("Timed out waiting" in line.text for line in lines)


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: boom",
        "[rank3]: torch.distributed.DistBackendError: NCCL error",
        "KeyboardInterrupt",
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "Connection reset by peer",
        "node1:12:34 [0] NCCL WARN Cuda failure",
    ],
)
def test_a_telling_line_is_found(tmp_path: Path, samples: ModuleType, text: str) -> None:
    made = samples.Made(tmp_path, "tell")
    made.log(made.arm_run("fault", 2, at_s=0, wall_s=[1.0], exits=[1]), 0, "all is well", text, "the Error of my ways")
    assert [line.text for line in output.lines(load(made.write()))] == [text]
