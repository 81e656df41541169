"""Reading a run folder: bounded, tolerant of what is missing, never outside of the folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from dtprobe.errors import DtprobeError
from dtprobe.report.load import load


@pytest.mark.parametrize("content", [None, "", "{", "[]", '"run"', "\x00\xff"])
def test_a_folder_without_a_readable_run_json_is_refused_in_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content, encoding="utf-8")
    with pytest.raises(DtprobeError) as caught:
        load(tmp_path)
    assert "run.json" in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.remedy


def test_a_verdict_that_cannot_be_read_is_a_problem_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    (tmp_path / "verdict.json").write_text('{"verdict": "repro', encoding="utf-8")
    folder = load(tmp_path)
    assert folder.verdict is None
    assert folder.problems[0].startswith("verdict.json cannot be read")


def test_a_frame_has_the_asked_columns_also_where_the_file_is_missing_or_noise(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "proc.parquet").write_bytes(b"PAR1" + bytes(200))
    folder = load(tmp_path)
    for name in ("syscalls", "proc"):
        frame = folder.frame(name, "t_ns", "threads")
        assert list(frame.columns) == ["arm", "repeat", "t_ns", "threads"]
        assert frame.empty
    assert len(folder.problems) == 1 and folder.problems[0].startswith("frames/proc.parquet cannot be read")


def test_a_frame_beyond_the_limit_is_cut_and_says_so(tmp_path: Path, samples: ModuleType) -> None:
    folder = load(samples.skipped(tmp_path / "run"))
    frame = folder.frame("collectives", "op", "no_such_column", rows=5)
    assert len(frame) == 5
    assert frame["no_such_column"].isna().all()
    assert folder.problems == ["frames/collectives.parquet: the first 5 rows are shown, there are more"]


def test_an_artifact_is_found_after_the_run_folder_moved(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.skipped(tmp_path / "before")
    source = str(made / "fault" / "2" / "rank0" / "stderr.log")
    made.rename(tmp_path / "after")
    place = load(tmp_path / "after").place(source, "fault", 2, 3)
    assert (place.href, place.line) == ("fault/2/rank0/stderr.log", 3)


@pytest.mark.parametrize(
    "source", ["/etc/passwd", "../../secret", "javascript:alert(1)", "", None, "a\0b", "fault/2/link", "x" * 5000]
)
def test_what_lies_outside_of_the_run_folder_is_no_artifact_of_it(tmp_path: Path, source: str | None) -> None:
    run = tmp_path / "runs" / "run"
    (run / "fault" / "2").mkdir(parents=True)
    (run / "run.json").write_text("{}", encoding="utf-8")
    (tmp_path / "secret").write_text("secret", encoding="utf-8")
    (run / "fault" / "2" / "link").symlink_to(tmp_path / "secret")
    folder = load(run)
    assert folder.artifact(source, "fault", 2) is None
    assert folder.place(source, "fault", 2).href is None


def test_the_traced_repeat_of_an_arm_is_the_marked_one_else_the_last(tmp_path: Path) -> None:
    runs = [
        {"arm": "fault", "repeat": 0, "traced": True},
        {"arm": "fault", "repeat": 1},
        {"arm": "control", "repeat": 0},
        {"arm": "control", "repeat": 1},
    ]
    (tmp_path / "run.json").write_text(json.dumps({"arm_runs": runs}), encoding="utf-8")
    folder = load(tmp_path)
    assert [folder.traced_repeat(arm) for arm in ("fault", "control", "mitigated")] == [0, 1, None]
    assert folder.arms == ["control", "fault"]
