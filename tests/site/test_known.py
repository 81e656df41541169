"""What is read of a folder of runs, whole and damaged."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from dtprobe import site
from dtprobe.site.known import BINS, slug_of, status_of


def test_a_scenario_has_a_cell_for_each_version_with_its_own_last_verdict(known: site.Known, made: ModuleType) -> None:
    scenario = known.scenario(made.GOOD)
    assert scenario is not None
    told = {version.torch: (cell.last.verdict, cell.good, cell.judged, cell.rates) for version, cell in scenario.cells.items()}
    assert told == {"2.12.0": ("reproduced", 3, 3, (1.0, 1.0, 1.0)), "2.13.0": ("partly", 2, 3, (1.0, 1.0, 0.0))}
    assert [version.torch for version in known.versions] == ["2.13.0", "2.12.0"]
    assert scenario.status == "not-as-expected"
    assert (scenario.layer, scenario.title) == ("process", "A rank is stopped; the others wait for it until their timeout")


def test_what_is_damaged_gone_or_unfinished_is_said_and_hides_nothing(known: site.Known, made: ModuleType) -> None:
    told = "\n".join(known.notices)
    assert "20990101T000000Z-deadbeef.parquet cannot be read" in told
    assert f"1 of {2 * made.NIGHTS} runs are in the history alone" in told
    assert "20251021T000000Z-9: summary.json cannot be read" in told
    scenario = known.scenario(made.GOOD)
    assert scenario is not None
    assert [run.there for run in scenario.runs] == [False] + [True] * (made.NIGHTS - 1)
    assert [matter for _, matter in scenario.odd] == ["unfinished: it was killed, or runs on another host"]


def test_an_empty_folder_is_no_error(tmp_path: Path) -> None:
    with closing(site.read(tmp_path / "absent", now_ns=0)) as known:
        pages = site.Pages(known)
        for path in pages.paths():
            assert pages.render(path)
        assert "No runs yet" in (pages.render("index.html") or "")


def test_many_runs_share_the_bars_of_a_cell(tmp_path: Path, made: ModuleType) -> None:
    from dtprobe.site.known import Run, Version, _cells

    version = Version("2.13.0", "3.11")
    fixed = {"scenario": "s", "slug": "s", "version": version, "verdict": "v", "expected": "v", "mitigation": None}
    rest = {"host": None, "git": None, "took_s": None, "night": None, "there": True}
    runs = [Run(id=str(n), started_ns=n, as_expected=n % 2 == 0, **fixed, **rest) for n in range(100)]
    cell = _cells(runs)[version]
    assert len(cell.rates) <= BINS
    assert (cell.good, cell.judged) == (50, 100)
    assert status_of(runs[1]) == "not-as-expected"


@pytest.mark.parametrize("name", ["../../etc/passwd", "<b>", "suites", "", "a/b", "a" * 300])
def test_a_name_that_no_scenario_has_gets_a_harmless_folder(name: str) -> None:
    slug = slug_of(name, "")
    assert slug not in ("", "suites", ".", "..") and "/" not in slug and "<" not in slug
    assert slug_of(name + "x", "") != slug
