"""A whole arm-run folder, with whatever a broken run leaves in it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dtprobe.readers.artifact import rank_of
from dtprobe.readers.folder import SCHEMAS, artifacts, read_folder

CORPUS = Path(__file__).parents[1] / "corpus"
HOSTILE = b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00ls\x85R."


def make(folder: Path) -> Path:
    arm = folder / "runs" / "x" / "rank9" / "control" / "0"
    for rank in (0, 1):
        (arm / f"rank{rank}").mkdir(parents=True)
        shutil.copy(CORPUS / "strace" / "f-ttt.txt", arm / f"rank{rank}" / "strace.txt")
        shutil.copy(CORPUS / "flight_recorder" / f"gloo_trace_rank_{rank}.json", arm / f"rank{rank}" / "fr-0.json")
        shutil.copy(CORPUS / "pyspy" / "dump.json", arm / f"rank{rank}" / "pyspy-0.json")
        (arm / f"rank{rank}" / "stdout.log").write_text("hello\n")
        (arm / f"rank{rank}" / "events.jsonl").write_text('{"t_ns": 1, "kind": "a"}\n')
        (arm / f"rank{rank}" / "proc.jsonl").write_text('{"t_ns": 1, "threads": 3}\n')
    (arm / "rank1" / "attempt0").mkdir()
    (arm / "rank1" / "attempt0" / "stdout.log").write_text("first attempt\n")
    shutil.copy(CORPUS / "perf" / "people.stat.txt", arm / "rank0" / "perf.stat.txt")
    shutil.copy(CORPUS / "perf" / "few.script.txt", arm / "rank0" / "perf.script.txt")
    shutil.copy(CORPUS / "inotify" / "seconds.txt", arm / "inotify.txt")
    (arm / "launcher").mkdir()
    (arm / "launcher" / "stderr.log").write_text("torchrun says\n")
    (arm / "rank0" / "unknown.bin").write_bytes(b"\0")
    return arm


def test_every_artifact_is_in_its_frame_with_its_rank(tmp_path: Path) -> None:
    arm = make(tmp_path)
    frames = read_folder(arm)
    assert list(frames) == list(SCHEMAS)
    for name, frame in frames.items():
        SCHEMAS[name].check(frame)
    assert len(frames["problems"]) == 0
    for name in ("syscalls", "collectives", "groups", "stacks", "events", "proc"):
        assert sorted(frames[name]["rank"].unique()) == [0, 1], name
    assert set(frames["perf_counts"]["rank"]) == set(frames["perf_samples"]["rank"]) == {0}
    assert frames["file_events"]["rank"].isna().all() and len(frames["file_events"])
    lines = frames["log_lines"].sort_values("text")
    assert lines["text"].tolist() == ["first attempt", "hello", "hello", "torchrun says"]
    assert lines["rank"].fillna(-1).tolist() == [1, 0, 1, -1], "folders above the arm run do not count"
    assert len(frames["gpu_ops"]) == 0


def test_broken_files_are_rows_of_problems_and_the_rest_is_read(tmp_path: Path) -> None:
    arm = make(tmp_path)
    (arm / "rank0" / "strace.txt").write_bytes(os.urandom(3000))
    (arm / "rank0" / "fr-0.json").write_bytes(HOSTILE)
    (arm / "rank1" / "proc.jsonl").unlink()
    os.mkfifo(arm / "rank1" / "proc.jsonl")
    (arm / "rank1" / "events.jsonl").write_text('{"t_ns": 1, "kind": "a"}\n{"t_')
    (arm / "rank0" / "stdout.log").unlink()
    (arm / "rank0" / "stdout.log").symlink_to("/etc/passwd")
    (arm / "rank0" / "a\nb").mkdir()
    (arm / "rank0" / "a\nb" / "strace.txt").write_text("7 close(3) = 0\n")
    frames = read_folder(arm)
    problems = {(Path(row.source).name, row.kind, row.rank) for row in frames["problems"].itertuples()}
    assert problems == {
        ("strace.txt", "unreadable", 0),
        ("fr-0.json", "refused", 0),
        ("proc.jsonl", "unreadable", 1),
        ("events.jsonl", "cut", 1),
    }
    assert not frames["problems"]["text"].str.contains("\n").any()
    assert set(frames["syscalls"]["rank"]) == {0, 1} and set(frames["collectives"]["rank"]) == {1}
    assert "root" not in " ".join(frames["log_lines"]["text"])


def test_an_absent_folder_is_a_problem_not_an_exception(tmp_path: Path) -> None:
    frames = read_folder(tmp_path / "absent")
    assert frames["problems"]["kind"].tolist() == ["unreadable"]
    assert all(len(frame) == 0 for name, frame in frames.items() if name != "problems")


def test_folders_are_searched_three_deep_only(tmp_path: Path) -> None:
    deep = tmp_path
    for at in range(6):
        deep = deep / f"d{at}"
        deep.mkdir()
        (deep / "strace.txt").write_text("close(3) = 0\n")
    assert [len(one.path.relative_to(tmp_path).parts) for one in artifacts(tmp_path)] == [2, 3, 4]


def test_ranks_in_names() -> None:
    assert rank_of(Path("rank3/strace.txt")) == 3
    assert rank_of(Path("a/rank_3/attempt0/fr-7.json")) == 3
    assert rank_of(Path("nccl_trace_rank_12")) == 12
    assert rank_of(Path("node1/worker.txt")) is None
    assert rank_of(Path("rank99999999999999.txt")) is None
    assert rank_of(Path("frank/ranking5.txt")) is None
    assert rank_of(Path("_dump_9"), r"_dump_([0-9]+)$") == 9
