"""py-spy's dumps, recorded with every option."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dtprobe.readers.artifact import Problem, ReaderError
from dtprobe.readers.pyspy import SCHEMA, read_pyspy

CORPUS = Path(__file__).parents[1] / "corpus" / "pyspy"


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_every_form_gives_the_same_threads(path: Path) -> None:
    problems: list[Problem] = []
    frame = SCHEMA.check(read_pyspy(path, problems=problems)).set_index("thread_name")
    assert problems == []
    assert set(frame.index) == {"MainThread", 'wait "x"'}
    waiting, main = frame.loc['wait "x"'], frame.loc["MainThread"]
    assert waiting["pid"] == main["pid"] == main["tid"] != waiting["tid"]
    assert not frame["active"].any() and not frame["owns_gil"].any()
    assert ";wait_for (waiting.py:8);Thread.run (threading.py:" in waiting["frames"]
    assert "<module> (waiting.py:" in main["frames"]
    if "native" in path.name:
        assert main["top"] == "clock_nanosleep (libc.so.6)"
    else:
        assert waiting["top"].startswith("Condition.wait (threading.py:")
    assert frame["locals"].notna().any() == ("locals" in path.name)
    if "locals" in path.name:
        assert "label" in waiting["locals"] and '"kind": [1, 2]' in waiting["locals"]
    assert (frame["t_ns"] == path.stat().st_mtime_ns).all()
    assert read_pyspy(path, dated=False)["t_ns"].isna().all()


def test_equal_stacks_have_equal_digests_whatever_the_form_and_the_line() -> None:
    digests = {
        read_pyspy(CORPUS / name).set_index("thread_name")["digest"]['wait "x"']
        for name in ("dump.txt", "dump.json", "dumplocals.txt")
    }
    assert len(digests) == 1
    frame = read_pyspy(CORPUS / "dump.txt")
    assert frame["digest"].nunique() == 2


def test_states_and_numbers_of_the_text_form(tmp_path: Path) -> None:
    path = tmp_path / "stack.py.3"
    path.write_text(
        "Process 7: python train.py (x)\nPython v3.10.14 (/usr/bin/python3.10)\n\n"
        'Thread 7 (active+gil): "MainThread"\n    step (train.py:3)\nThread 0x7F00AA (idle): "w"\n    run (a b.py:9)\nThread 9 (active)\n'
        "# rc 0, 0.01 s\n"
    )
    frame = read_pyspy(path)
    assert frame["owns_gil"].tolist() == [True, False, False]
    assert frame["active"].tolist() == [True, False, True]
    assert frame["tid"].fillna(0).tolist() == [7, 0, 9]
    assert frame["top"].fillna("").tolist() == ["step (train.py:3)", "run (a b.py:9)", ""]
    assert pd.isna(frame["thread_name"][2]) and set(frame["rank"]) == {3}


@pytest.mark.parametrize(
    "text", ["", "Error: Failed to get process executable name\n", '[{"pid": 1, "frames"', '{"frames": 3}', "[1, 2]"]
)
def test_what_has_no_thread_is_one_clear_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pyspy-0.json"
    path.write_text(text)
    with pytest.raises(ReaderError, match="is not a py-spy dump"):
        read_pyspy(path)
