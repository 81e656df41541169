"""The whole report: every verdict, what is missing, hostile content, size, sameness."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from dtprobe import report
from dtprobe.errors import DtprobeError
from dtprobe.report import page

ALL = ["leak", "skipped", "unsupported", "inconclusive", "error", "injection", "unfinished", "hostile"]


class _Seen(HTMLParser):
    """Tags, ids, links and headings of a document as a browser's parser would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src"):
                self.links.append(value or "")


def _seen(text: str) -> _Seen:
    parser = _Seen()
    parser.feed(text)
    parser.close()
    return parser


@pytest.mark.parametrize("name", ALL)
def test_every_kind_of_run_gives_three_files_that_need_nothing_from_outside(
    tmp_path: Path, samples: ModuleType, name: str
) -> None:
    folder = samples.SAMPLES[name](tmp_path)
    written = report.write(folder)
    assert written == folder / "report.html"
    assert (folder / "report.md").stat().st_size > 500
    json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    text = written.read_text(encoding="utf-8")
    assert len(text) < 600_000
    seen = _seen(text)
    assert not {"script", "iframe", "img", "object", "embed", "form", "base"} & set(seen.tags)
    assert not {name for name in seen.attributes if name.startswith("on")}
    assert sorted(seen.ids) == sorted(set(seen.ids))
    for link in seen.links:
        assert link.startswith(("./", "#")) or link == "data:,", link
        if link.startswith("#"):
            assert link[1:] in seen.ids
    for target in re.findall(r"url\(([^)]*)\)", text):
        assert target.removeprefix("#") in seen.ids


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "leak",
            [
                "Partly true",
                "the cure held",
                "as expected",
                "127 to 1842",
                "+74.0 %",
                "bpftrace is not installed",
                "apt-get install bpftrace",
            ],
        ),
        (
            "skipped",
            [
                "Reproduced",
                "rank 1 never entered all_reduce #5",
                "stands elsewhere than most",
                "fault/0/rank0/stderr.log",
                "line 3",
            ],
        ),
        ("unsupported", ["Unsupported here", "needs an HCA", "expected reproduced", "Nothing was recorded"]),
        ("inconclusive", ["Inconclusive", "The port belongs to somebody else.", "killed by SIGKILL"]),
        ("error", ["Error", "the judge raised KeyError", "Not run: the fault and mitigated arms"]),
        (
            "injection",
            [
                "Not fired",
                "SIGKILL to pid 4000",
                "never</span>",
                "dtprobe inject --replay 20250615T150640Z-0badcafe -- torchrun train.py",
            ],
        ),
        ("unfinished", ["No verdict", "This run is unfinished", "No frames were made", "end unknown"]),
    ],
)
def test_the_page_says_what_the_run_says(tmp_path: Path, samples: ModuleType, name: str, words: list[str]) -> None:
    folder = samples.SAMPLES[name](tmp_path)
    text = report.write(folder).read_text(encoding="utf-8")
    assert [word for word in words if word not in text] == []


def test_a_run_with_a_verdict_and_an_end_is_not_called_unfinished(tmp_path: Path, samples: ModuleType) -> None:
    text = report.write(samples.injection(tmp_path)).read_text(encoding="utf-8")
    assert "unfinished" not in text
    assert "make scenario" not in text


@pytest.mark.parametrize(
    ("documented", "unit", "values"),
    [
        ("+44 (3 to 47)", "threads", (44.0,)),
        ("127 to 1,842", "", (127.0, 1842.0)),
        ("22.1 Gbit/s", "Gbit/s", (22.1,)),
        ("22.1 Gbit/s", "MiB/s", ()),
        ("a lot", "", ()),
        ("", "s", ()),
    ],
)
def test_only_figures_on_the_scale_of_ours_are_drawn_beside_them(documented: str, unit: str, values: tuple[float, ...]) -> None:
    assert page.figures_of(documented, unit) == values


def test_the_markdown_says_the_same(tmp_path: Path, samples: ModuleType) -> None:
    folder = samples.skipped(tmp_path)
    report.write(folder)
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# Reproduced: A made-up sample of collective-skipped\n")
    assert "| hang time (range) | 0 s | 5.02 s (5.01 to 5.04 s, n=3) | 1 s (1 to 1.01 s, n=3) | nothing |" in text
    assert "rank 1 never entered all\\_reduce \\#5; ranks 0, 2, 3 waited there." in text
    assert "`dtprobe run collective-skipped --seed 7`" in text


def test_hostile_text_stays_text(tmp_path: Path, samples: ModuleType) -> None:
    folder = samples.hostile(tmp_path)
    text = report.write(folder).read_text(encoding="utf-8")
    assert "alert(1)" in text and "<script" not in text and "<img" not in text
    assert "{{ 7*7 }}" in text and "\x1b" not in text
    assert "xxxxxxxxxx" * 50 not in text
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    outside_of_code = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", markdown)
    assert not re.search(r"(?<!\\)<|(?<!\\)\]\(|(?<!\\)\|\[x", outside_of_code)


def test_the_same_run_gives_the_same_bytes(tmp_path: Path, samples: ModuleType) -> None:
    folder = samples.skipped(tmp_path / "run")
    first = report.write(folder).read_bytes()
    moved = tmp_path / "elsewhere"
    shutil.move(folder, moved)
    assert report.write(moved).read_bytes() == first
    assert str(tmp_path).encode() not in first


def test_a_missing_frame_leaves_the_rest(tmp_path: Path, samples: ModuleType) -> None:
    folder = samples.leak(tmp_path)
    for frame in sorted((folder / "frames").iterdir()):
        whole = frame.read_bytes()
        frame.write_bytes(whole[: len(whole) // 2])
        text = report.write(folder).read_text(encoding="utf-8")
        assert f"frames/{frame.name} cannot be read" in text
        assert "Partly true" in text
        frame.write_bytes(whole)


def test_a_long_log_does_not_enter_the_page(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "long")
    run = made.arm_run("fault", 2, at_s=0, wall_s=[5.0], exits=[1])
    made.log(run, 0, *(f"ValueError: number {'abcdefghij'[i % 10] * (i % 997)} {i}" for i in range(30_000)))
    assert report.write(made.write()).stat().st_size < 100_000


def test_links_lead_to_files_that_exist(tmp_path: Path, samples: ModuleType) -> None:
    folder = samples.skipped(tmp_path)
    for link in _seen(report.write(folder).read_text(encoding="utf-8")).links:
        if link.startswith("./"):
            assert (folder / link).exists(), link


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, samples: ModuleType) -> None:
    folder = samples.error(tmp_path)
    (folder / "report.html").mkdir()
    with pytest.raises(DtprobeError, match="cannot write the report into") as caught:
        report.write(folder)
    assert "\n" not in str(caught.value)


def test_colours_come_from_the_page_and_never_from_the_figure(tmp_path: Path, samples: ModuleType) -> None:
    text = report.write(samples.leak(tmp_path)).read_text(encoding="utf-8")
    figures = re.findall(r"<svg .*?</svg>", text, flags=re.DOTALL)
    assert len(figures) > 8
    for figure in figures:
        assert not re.findall(r"#[0-9a-fA-F]{6}\b", re.sub(r"#[\w-]*-[\w-]+", "", figure)), figure[:200]
        assert "var(--ink-" in figure
        assert '<title id="' in figure and 'role="img"' in figure
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    for block in (
        text[text.index(":root {") : text.index("@media (prefers-color-scheme: dark)")],
        text[text.index("@media (prefers-color-scheme: dark)") :],
    ):
        defined = set(re.findall(r"(--[\w-]+):", block))
        assert {name for name in used if name not in defined} <= {"--tone", "--tone-bg"}
