"""The diagnosis of a folder's runs, kept as data."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from dtprobe import site
from dtprobe.site import confusion


def _row(name: str, truth: str, said: str, *, right: bool, undecided: bool = False) -> dict[str, object]:
    outcome = "right" if right else "undetermined" if undecided else "taken for another mode"
    told = {"name": name, "truth": truth, "said": said, "outcome": outcome, "right": right, "open": undecided}
    return {**told, "confidence": 0.5, "because": "<i>"}


def _page(out: Path) -> str:
    with closing(site.read(out, now_ns=0)) as known:
        return site.Pages(known).render("confusion.html") or ""


def test_arms_are_counted_by_group_and_the_wrong_ones_come_first(tmp_path: Path) -> None:
    rows = [
        _row("fine", "rank-stopped", "rank-stopped", right=True),
        _row("open", "gil-held", "undetermined", right=False, undecided=True),
        _row("bad", "gil-held", "rank-stopped", right=False),
    ]
    data = {"schema": confusion.SCHEMA, "made_ns": 10**18, "rows": rows}
    (tmp_path / confusion.FILE).write_text(json.dumps(data), encoding="utf-8")
    found = confusion.load(tmp_path)
    assert isinstance(found, confusion.Matrix)
    assert [row["name"] for row in found.rows] == ["bad", "open", "fine"]
    assert sum(found.cells.values()) == 3 and found.said[-1] == "undetermined"
    page = _page(tmp_path)
    assert "1 of 3 fault arms" in page and "&lt;i&gt;" in page


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "other/1"}', '{"schema": "dtprobe.confusion/1", "rows": 3}'])
def test_a_damaged_file_is_said_on_the_page(tmp_path: Path, text: str) -> None:
    (tmp_path / confusion.FILE).write_text(text, encoding="utf-8")
    assert isinstance(confusion.load(tmp_path), str)
    assert confusion.FILE in _page(tmp_path)


def test_without_it_the_page_says_how_to_make_it(tmp_path: Path) -> None:
    assert "dtprobe site --confusion" in _page(tmp_path)


def test_diagnosing_runs_without_a_fault_arm_gives_an_empty_matrix(tmp_path: Path) -> None:
    confusion.diagnose(tmp_path, 5)
    found = confusion.load(tmp_path)
    assert isinstance(found, confusion.Matrix) and (found.rows, found.made_ns) == ((), 5)
