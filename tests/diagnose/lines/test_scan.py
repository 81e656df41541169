"""A large log gives what matters of it, with the very numbers of its lines."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtprobe.diagnose.case import Artifact
from dtprobe.diagnose.lines import joined, planned, read, scan

ANCHORS = ("ANCHOR", "boom", "boom now")


def _around(path: Path, data: bytes, most: int = 100_000) -> list[tuple[int, bytes]]:
    path.write_bytes(data)
    return list(scan.around(Artifact(name="a", path=path, kind="text", size=len(data)), ANCHORS, most, scan.Extent()))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "CHUNK", 1000)
    monkeypatch.setattr(scan, "TAIL", 500)
    monkeypatch.setattr(scan, "HEAD", 3)


@pytest.mark.usefixtures("small")
def test_every_line_with_an_anchor_is_read_with_its_number_and_its_neighbours(tmp_path: Path) -> None:
    @given(st.integers(0, 2**32))
    @settings(max_examples=60)
    def holds(seed: int) -> None:
        draw = random.Random(seed)
        lengths = (0, 5, 20, 80, 7, 7, 7, 3000)
        lines = [
            b"x" * draw.choice(lengths) + draw.choice([b"", b"", b"ANCHOR", b"boom now"]) + b"y" * draw.randint(0, 9)
            for _ in range(draw.randint(0, 150))
        ]
        got = _around(tmp_path / "a", b"\n".join(lines))
        numbers = [number for number, _ in got]
        assert numbers == sorted(numbers)
        assert all(text in lines[number - 1] for number, text in got)
        wanted = {number for number, text in enumerate(lines, 1) if b"ANCHOR" in text or b"boom" in text}
        assert wanted <= {number for number, text in got if b"ANCHOR" in text or b"boom" in text}
        for number in wanted:
            near = range(max(1, number - scan.BEFORE), min(len(lines), number + scan.AFTER) + 1)
            if all(len(lines[one - 1]) < 1000 for one in near):
                assert all(one in numbers or not lines[one - 1] for one in near)

    holds()


def test_of_a_text_that_comes_often_the_first_and_last_lines_are_read(tmp_path: Path) -> None:
    lines = [b"quiet %d" % at if at % 3 else b"boom %d" % at for at in range(300_000)]
    got = _around(tmp_path / "a", b"\n".join(lines), most=20_000)
    hits = [text for _, text in got if b"boom" in text]
    assert hits[0] == b"boom 0" and hits[-1] == b"boom 299997" and len(got) < 40_000


def test_a_hit_in_the_middle_of_an_endless_line_is_read_with_its_surroundings(tmp_path: Path) -> None:
    got = _around(tmp_path / "a", b"first\n" + b"x" * 9_000_000 + b" ANCHOR " + b"y" * 9_000_000 + b"\nlast")
    assert any(number == 2 and b" ANCHOR " in text for number, text in got)
    assert got[-1] == (3, b"last") and sum(len(text) for _, text in got) < 1 << 20


def test_large_logs_are_read_in_part_and_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    step = b"2025-01-01 00:00:00 step loss 1.0 and so on and so on\n"
    path.write_bytes(step * 60_000 + b"[rank3]: Traceback (most recent call last):\n[rank3]: ValueError: x\n" + step * 60_000)
    problems: list = []
    texts = planned([Artifact(name="a.log", path=path, kind="text", size=path.stat().st_size)])
    lines = joined(texts, map(read, texts), problems)
    assert [(one.number, one.rank) for one in lines if "ValueError" in one.text] == [(60_002, 3)]
    assert len(lines) < 40_000
    assert [one.kind for one in problems] == ["cut"] and "of 120,002 lines" in problems[0].text
