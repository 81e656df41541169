"""inotifywait's formats, recorded, and our recorder's."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtprobe.readers.artifact import Problem, ReaderError
from dtprobe.readers.inotify import SCHEMA, read_inotify

CORPUS = Path(__file__).parents[1] / "corpus" / "inotify"
HAPPENED = [
    ("create", "watched/a b,c.txt"),
    ("open", "watched/a b,c.txt"),
    ("modify", "watched/a b,c.txt"),
    ("close_write", "watched/a b,c.txt"),
    ("moved_from", "watched/a b,c.txt"),
    ("moved_to", "watched/e"),
    ("delete", "watched/e"),
]


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_every_format_tells_the_same_story(path: Path) -> None:
    problems: list[Problem] = []
    frame = SCHEMA.check(read_inotify(path, problems=problems))
    files = frame[frame["path"] != "watched/"]
    assert list(zip(files["kind"], files["path"], strict=True)) == HAPPENED
    timed = path.stem in ("seconds", "joined")
    assert frame["t_ns"].notna().all() == timed and frame["t_ns"].isna().all() != timed
    assert [one.kind for one in problems] == (["clock"] if path.stem == "dated" else [])
    assert frame["holders"].isna().all()
    assert files["names"].tolist()[3] == "close_write,close"


def test_our_recorders_form(tmp_path: Path) -> None:
    path = tmp_path / "inotify.txt"
    path.write_text(
        '1790000000.25 /s/store file MODIFY [[7, "python", 5]]\n1790000000.000000001 /s/store file OPEN,ISDIR -\n'
        '1790000001 /s/x IN_DELETE [[7, "pyth'
    )
    problems: list[Problem] = []
    frame = SCHEMA.check(read_inotify(path, problems=problems))
    assert frame["t_ns"].tolist() == [1_790_000_000_250_000_000, 1_790_000_000_000_000_001]
    assert frame["path"].tolist() == ["/s/store file"] * 2
    assert frame["kind"].tolist() == ["modify", "open"]
    assert frame["holders"].fillna("").tolist() == ['[[7, "python", 5]]', ""]
    assert [one.kind for one in problems] == ["cut"]


def test_other_text_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "inotify.txt"
    path.write_text("hello\n")
    with pytest.raises(ReaderError, match="is not inotifywait output"):
        read_inotify(path)
