"""Each layout that a launcher, container or logger gives its lines: whose the line is, when, and the text inside."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from dtprobe.diagnose.case import Artifact, Line
from dtprobe.diagnose.lines import read_lines


def _lines(path: Path, content: str | bytes, **about: object) -> list[Line]:
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(data)
    return list(read_lines(Artifact(name=path.name, path=path, kind="text", size=len(data), **about)))  # type: ignore[arg-type]


def _ns(text: str) -> int:
    moment = datetime.fromisoformat(text)
    return int(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()) * 10**9 + moment.microsecond * 1000


@pytest.mark.parametrize(
    ("raw", "rank", "text"),
    [
        ("[rank3]: boom", 3, "boom"),
        ("[rank3]:   indented", 3, "  indented"),
        (
            "[rank12]:[E1112 03:41:18.515455609 ProcessGroupNCCL.cpp:616] x",
            12,
            "[E1112 03:41:18.515455609 ProcessGroupNCCL.cpp:616] x",
        ),
        ("[default0]:[rank8]: boom", 8, "boom"),
        ("[rank: 5] Seed set to 1", 5, "Seed set to 1"),
        ("[RANK 2] [I] loading", 2, "[I] loading"),
        ("[rank=4] loading", 4, "loading"),
        ("(rank 6) loading", 6, "loading"),
        ("rank 7: loading", 7, "loading"),
        ("rank7 | loading", 7, "loading"),
        ("[1,3]<stderr>:boom", 3, "boom"),
        ("[1,3]<stdout>: boom", 3, "boom"),
        ("[prterun-n1-77@1,9]<stderr>: boom", 9, "boom"),
        ("Fri Nov 24 23:33:09 2023[1,11]<stderr>:boom", 11, "boom"),
        ("[pod/job-worker-1/main] [rank9]: boom", 9, "boom"),
        ("(TrainWorker pid=71, ip=10.0.0.7) [rank1]: boom", 1, "boom"),
        ("(Worker_TP1 pid=902) boom", 1, "boom"),
        ("(VllmWorker rank=2 pid=902) boom", 2, "boom"),
        ("(Worker_DP1_TP0 pid=902) boom", None, "boom"),
        ("[2025-02-24 14:06:11 DP1 TP0] boom", None, "boom"),
        ("2026-02-18T10:20:10.110Z [rank7]: boom", 7, "boom"),
        ("2026-02-18T10:20:10.110123456Z stderr F [rank7]: boom", 7, "boom"),
        ('{"log":"[rank7]: boom\\n","stream":"stderr","time":"2026-02-18T10:20:10.1Z"}', 7, "boom"),
        ('{"time": "2026-02-18T10:20:10Z", "level": "error", "rank": 6, "message": "boom"}', 6, "boom"),
        ("\x1b[36m(TrainWorker pid=71)\x1b[0m [rank1]: \x1b[31mboom\x1b[0m", 1, "boom"),
        ("2024-11-12 03:21:00 | rank=3 | boom", 3, "boom"),
        ("[2025-02-24 14:06:11 TP8] boom", 8, "boom"),
        ("[E ProcessGroupNCCL.cpp:475] [Rank 6] boom", 6, "[E ProcessGroupNCCL.cpp:475] [Rank 6] boom"),
        (
            "[E ProcessGroupNCCL.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 4] boom",
            4,
            "[E ProcessGroupNCCL.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 4] boom",
        ),
        ("  what():  [Rank 5] boom", 5, "  what():  [Rank 5] boom"),
    ],
)
def test_the_rank_that_printed_a_line_is_read_from_its_tag(tmp_path: Path, raw: str, rank: int | None, text: str) -> None:
    (line,) = _lines(tmp_path / "a.log", raw)
    assert (line.rank, line.text) == (rank, text)


@pytest.mark.parametrize(
    "raw",
    [
        "Rank 3 has launched up to operation 16 -- GPU 1 managed by process 12 on node 10.0.0.2",
        "RuntimeError: rank 3 failed to pass monitoredBarrier in 30000 ms",
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 2000",
        "[E ProcessGroupNCCL.cpp:1] [PG ID 2 PG GUID 7(tp) Rank 4] the rank within a group is not the job's",
        "h1:10:11 [0] NCCL INFO comm 0x1 rank 3 nranks 8 cudaDev 0 busId 1b000 - Init START",
        "see [3] for more",
        "ranked 3: loading",
    ],
)
def test_a_rank_that_a_line_is_about_is_not_the_one_that_printed_it(tmp_path: Path, raw: str) -> None:
    (line,) = _lines(tmp_path / "a.log", raw)
    assert line.rank is None


@pytest.mark.parametrize(
    ("raw", "when"),
    [
        ("2025-06-26 08:01:00,220 - root - INFO - x", "2025-06-26T08:01:00.220"),
        ("[titan] 2025-06-26 08:01:00,220 - root - INFO - x", "2025-06-26T08:01:00.220"),
        ("[2025-06-26 08:01:00] iteration 1", "2025-06-26T08:01:00"),
        (" [2025-06-26 08:01:00] iteration 1", "2025-06-26T08:01:00"),
        ("[2025-06-26 08:01:00 TP8] x", "2025-06-26T08:01:00"),
        ("[2025-06-26 08:01:00,220][__main__][INFO] - x", "2025-06-26T08:01:00.220"),
        ("2025-06-26T08:01:00+02:00 x", "2025-06-26T06:01:00"),
        ("2025-06-26T08:01:00.5Z x", "2025-06-26T08:01:00.5"),
        ("[06/26/2025-08:01:00] [TRT-LLM] [I] x", "2025-06-26T08:01:00"),
        ("06/26/2025 08:01:00 PM - INFO - x", "2025-06-26T20:01:00"),
        ("[06/26/25 08:01:00] INFO x", "2025-06-26T08:01:00"),
        ("[Thu Jun 26 08:01:00 2025] NVRM: x", "2025-06-26T08:01:00"),
        ("Thu Jun 26 08:01:00 UTC 2025 x", "2025-06-26T08:01:00"),
        ("submitit INFO (2025-06-26 08:01:00,220) - x", "2025-06-26T08:01:00.220"),
        ("slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2025-06-26T08:01:00 ***", "2025-06-26T08:01:00"),
        ("1750924860.250000 write(1, 2)", "2025-06-26T08:01:00.25"),
        ("E20250626 08:01:00.220000 12 a.cc:3] x", "2025-06-26T08:01:00.220"),
    ],
)
def test_stamps_with_a_year_are_placed(tmp_path: Path, raw: str, when: str) -> None:
    (line,) = _lines(tmp_path / "a.log", raw)
    assert line.t_ns == _ns(when)


@pytest.mark.parametrize(
    ("raw", "when"),
    [
        ("[E626 08:01:00.220000000 ProcessGroupNCCL.cpp:616] x", "06-26T08:01:00.220"),
        ("W0626 08:01:00.220000 501 torch/distributed/run.py:792] x", "06-26T08:01:00.220"),
        ("[default0]:I0626 08:01:00.220 logging.py:393] x", "06-26T08:01:00.220"),
        ("INFO 06-26 08:01:00 [loggers.py:123] x", "06-26T08:01:00"),
        ("Jun 26 08:01:00 n1 kernel: x", "06-26T08:01:00"),
        ("[Jun26 08:01] x", None),
        ("[Jun 26 08:01] x", "06-26T08:01:00"),
    ],
)
def test_a_stamp_without_a_year_takes_the_one_of_the_dates_around(tmp_path: Path, raw: str, when: str | None) -> None:
    line = _lines(tmp_path / "a.log", raw + "\n", near_ns=_ns("2025-07-01T00:00:00"))[0]
    assert line.t_ns == (None if when is None else _ns("2025-" + when))
    dated = _lines(tmp_path / "b.log", "2021-05-01 00:00:00 start\n" + raw, near_ns=_ns("2025-07-01T00:00:00"))[1]
    assert dated.t_ns == (None if when is None else _ns("2021-" + when))


def test_a_december_stamp_before_a_january_date_is_of_the_year_before(tmp_path: Path) -> None:
    first, _ = _lines(
        tmp_path / "a.log", "[E1231 23:59:59.000000 a.cpp:1] x\n2025-01-01 00:00:03 y\n", dated_ns=_ns("2025-01-01T00:00:00")
    )
    assert first.t_ns == _ns("2024-12-31T23:59:59")


def test_a_stamp_without_a_year_is_not_after_its_file_was_written(tmp_path: Path) -> None:
    (line,) = _lines(tmp_path / "a.log", "[Jan 2 10:47] x\n", near_ns=_ns("2025-11-30T00:00:00"))
    assert line.t_ns == _ns("2025-01-02T10:47:00")


def test_the_deltas_of_dmesg_count_from_the_stamp_before_and_seconds_since_a_boot_are_not_placed(tmp_path: Path) -> None:
    lines = _lines(
        tmp_path / "d",
        "[Jan 2 10:47] a\n[  +0.000003] b\n[  +1.500000] c\n[5301221.730123] d\n",
        near_ns=_ns("2025-01-05T00:00:00"),
    )
    start = _ns("2025-01-02T10:47:00")
    assert [one.t_ns for one in lines] == [start, start + 3000, start + 1_500_003_000, None]
    assert [one.text for one in lines] == ["a", "b", "c", "d"]


def test_srun_labels_are_ranks_unless_the_ranks_own_tags_contradict_them(tmp_path: Path) -> None:
    plain = _lines(tmp_path / "a", "".join(f"{task:>2}: step {task}\n" for task in (8, 10, 9, 11, 8)))
    assert [(one.rank, one.text) for one in plain[:2]] == [(8, "step 8"), (10, "step 10")]
    nodes = _lines(tmp_path / "b", "0: [rank0]: a\n1: [rank8]: b\n1: [rank9]: c\n0: plain\n")
    assert [(one.rank, one.text) for one in nodes] == [(0, "a"), (8, "b"), (9, "c"), (None, "plain")]


def test_a_numbered_list_is_not_taken_for_srun_labels(tmp_path: Path) -> None:
    lines = _lines(tmp_path / "a", "1: first\n2: second\n3: third\n4: fourth\n")
    assert {one.rank for one in lines} == {None}


@pytest.mark.parametrize("layout", ["{host} | {text}", "{host}: {text}", "{host} {text}", "{host} pytorch {text}"])
def test_a_name_before_each_line_is_its_host(tmp_path: Path, layout: str) -> None:
    rows = [(f"trainer-{at % 2}", f"message {at}") for at in range(8)]
    lines = _lines(tmp_path / "a", "\n".join(layout.format(host=host, text=text) for host, text in rows))
    assert [(one.host, one.text) for one in lines] == rows


def test_words_that_begin_many_lines_are_no_hosts(tmp_path: Path) -> None:
    lines = _lines(tmp_path / "a", "INFO | one\nINFO | two\nINFO | three\nepoch-1 x\nepoch-1 y\nepoch-1 z\n")
    assert {one.host for one in lines} == {None}


def test_syslog_names_the_host_and_kernel_lines_lose_their_head(tmp_path: Path) -> None:
    lines = _lines(
        tmp_path / "a", "Jun 26 08:01:00 n1 kernel: [12.345678] NVRM: x\n2025-06-26T08:01:00+0000 n2 systemd[1]: y\n"
    )
    assert [(one.host, one.text) for one in lines] == [("n1", "NVRM: x"), ("n2", "systemd[1]: y")]


def test_an_nccl_line_names_host_and_process_and_stays_whole(tmp_path: Path) -> None:
    (line,) = _lines(tmp_path / "a", "[2025-06-26 08:01:00] gpu7:318:625 [3] NCCL INFO x")
    assert (line.host, line.pid, line.text) == ("gpu7", 318, "gpu7:318:625 [3] NCCL INFO x")


def test_two_ranks_in_one_line_are_told_apart(tmp_path: Path) -> None:
    lines = _lines(
        tmp_path / "a",
        "[rank0]: loss [rank1]: Traceback (most recent call last):\n 40%|#### | 4/9 [00:01<00:02][rank2]:[E1112 03:41:18.515455609 a.cpp:6] x",
    )
    assert [(one.number, one.rank, one.text) for one in lines[:2]] == [
        (1, 0, "loss"),
        (1, 1, "Traceback (most recent call last):"),
    ]
    assert (lines[-1].number, lines[-1].rank) == (2, 2)
    assert lines[1].raw == "[rank1]: Traceback (most recent call last):"


def test_what_goes_on_without_a_tag_belongs_to_the_line_before(tmp_path: Path) -> None:
    lines = _lines(
        tmp_path / "a",
        "[rank3]:[E1112 03:41:18.515455609 a.cpp:6] boom\nException raised from checkTimeout\nframe #0: x\n\n#1 step from t.py:3\nnext\n",
    )
    assert [one.rank for one in lines] == [3, 3, 3, 3, None]


def test_a_traceback_interleaved_between_ranks_is_whole_per_rank(tmp_path: Path) -> None:
    rows = ["Traceback (most recent call last):", '  File "t.py", line 3, in <module>', "    main()", "ValueError: x"]
    mixed = "".join(f"[rank{rank}]: {row}\n" for row in rows for rank in (0, 1))
    lines = _lines(tmp_path / "a", mixed)
    assert [one.text for one in lines if one.rank == 1] == rows


def test_of_a_progress_bar_the_last_state_stays_and_messages_between(tmp_path: Path) -> None:
    lines = _lines(tmp_path / "a", " 1%|#  | 1/9 [00:01<00:08]\r[rank0]: boom\r 2%|#  | 2/9 [00:02<00:07]\r\nnext\r\n")
    assert [(one.number, one.text) for one in lines] == [(1, "boom"), (1, " 2%|#  | 2/9 [00:02<00:07]"), (2, "next")]


def test_text_of_two_bytes_a_character_is_read(tmp_path: Path) -> None:
    lines = _lines(tmp_path / "a", "\ufeff[rank1]: boom\r\n".encode("utf-16-le"))
    assert [(one.rank, one.text) for one in lines] == [(1, "boom")]


def test_of_a_line_beyond_measure_its_head_its_tail_and_what_is_known_are_read(tmp_path: Path) -> None:
    data = b"[rank1]: start " + b"x" * 400_000 + b" Traceback (most recent call last): " + b"y" * 400_000 + b" end\nnext\n"
    lines = _lines(tmp_path / "a", data)
    text = " ".join(one.text for one in lines)
    assert {one.number for one in lines} == {1, 2}
    assert "start" in text and "Traceback" in text and " end" in text and len(text) < 100_000


def test_a_rank_that_stands_behind_a_host_is_learned_too(tmp_path: Path) -> None:
    rows = [(f"c{11 + rank // 2}", rank, at) for at in range(3) for rank in range(4)]
    lines = _lines(
        tmp_path / "a", "\n".join(f"[{host}] 2025-05-05 10:00:0{at} INFO rank={rank}: at {at}" for host, rank, at in rows)
    )
    assert [(one.host, one.rank, one.text) for one in lines] == [(host, rank, f"at {at}") for host, rank, at in rows]


def test_the_level_of_a_complaint_is_kept_before_its_text_but_not_before_a_tracebacks(tmp_path: Path) -> None:
    rows = [
        ("INFO", "at 1"),
        ("WARNING", "slow disk"),
        ("ERROR", "cannot save"),
        ("ERROR", '  File "a.py", line 1, in f'),
        ("ERROR", "KeyError: 3"),
    ]
    text = "\n".join(f"2025-05-05 10:00:00,1 - fit - {level} - rank {at % 2} - {one}" for at, (level, one) in enumerate(rows))
    lines = _lines(tmp_path / "a", text)
    assert [one.text for one in lines] == ["at 1", "WARNING: slow disk", "ERROR: cannot save", rows[3][1], "KeyError: 3"]
    assert [one.rank for one in lines] == [0, 1, 0, 1, 0]
