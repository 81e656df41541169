"""The static site: whole, movable, escaped, and never in place of something else."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

from dtprobe import site
from dtprobe.errors import UsageError


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []
        self.scripts = 0
        self.images = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.images += tag == "img"
        self.hrefs += [value for name, value in attrs if name in ("href", "src", "action") and value]


def links(page: Path) -> Links:
    parser = Links()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser


@pytest.fixture(scope="module")
def built(known: site.Known, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, moved after it was written."""
    folder = tmp_path_factory.mktemp("built")
    site.write(known, folder / "site", newest=2)
    (folder / "site").rename(folder / "moved")
    return folder / "moved"


def test_every_link_leads_to_a_file_of_the_site(built: Path) -> None:
    pages = sorted(built.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        for href in links(page).hrefs:
            if href.startswith(("#", "data:")):
                continue
            parts = urlsplit(href)
            assert not parts.scheme and not parts.netloc, (page, href)
            target = (page.parent / unquote(parts.path)).resolve()
            assert target.is_file() and target.is_relative_to(built.resolve()), (page, href)


def test_hostile_texts_are_text(built: Path) -> None:
    for page in built.rglob("*.html"):
        found = links(page)
        assert found.images == 0, page
        assert found.scripts == (0 if page.name == "report.html" else 1), page
    assert "&lt;script&gt;" in (built / "claims.html").read_text(encoding="utf-8")


def test_reports_are_copied_for_the_newest_runs_and_what_is_not_copied_is_said(
    built: Path, known: site.Known, made: ModuleType
) -> None:
    scenario = known.scenario(made.GOOD)
    assert scenario is not None
    copied = {path.parent.name for path in built.glob(f"runs/{made.GOOD}/*/report.html")}
    # The newest two, and the last under the earlier torch.
    assert copied == {scenario.runs[index].id for index in (2, 4, 5)}
    page = (built / "scenarios" / f"{made.GOOD}.html").read_text(encoding="utf-8")
    assert page.count("report not copied") == 2 and page.count("folder gone") == 1
    report = (built / "runs" / made.GOOD / scenario.runs[5].id / "report.html").read_text(encoding="utf-8")
    assert "A copy without the raw files" in report and 'href="./' not in report


def test_regressions_are_on_the_overview_the_scenario_and_the_night(built: Path, made: ModuleType) -> None:
    for page in ("index.html", "regressions.html", f"scenarios/{made.GOOD}.html", f"nights/{made.night_id(5)}.html"):
        assert "git bisect run dtprobe" in (built / page).read_text(encoding="utf-8"), page
    assert 'class="mark-regression"' in (built / "scenarios" / f"{made.GOOD}.html").read_text(encoding="utf-8")
    assert 'class="mark-regression"' not in (built / "scenarios" / f"{made.HOSTILE}.html").read_text(encoding="utf-8")


def test_no_page_runs_a_script_that_its_policy_does_not_name(built: Path) -> None:
    page = (built / "index.html").read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "unsafe" not in policy[1] and "default-src &#39;none&#39;" in policy[1] and "connect-src" not in policy[1]


def test_an_earlier_site_is_replaced_and_anything_else_refused(known: site.Known, tmp_path: Path) -> None:
    to = tmp_path / "site"
    site.write(known, to)
    (to / "scenarios" / "old.html").write_text("of a scenario that is no more")
    site.write(known, to)
    assert not (to / "scenarios" / "old.html").exists()
    assert json.loads((to / "site.json").read_text())["schema"] == "dtprobe.site/1"
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="holds something else than a site"):
        site.write(known, other)
    (tmp_path / "link").symlink_to(other)
    with pytest.raises(UsageError, match="is no folder"):
        site.write(known, tmp_path / "link")
    assert (other / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "mine", "site"]


def test_a_history_of_hostile_names_stays_within_the_site(tmp_path: Path, made: ModuleType) -> None:
    from dtprobe.store import Store
    from dtprobe.store.archive import rows_of

    store = Store.open(tmp_path / "runs")
    run = {"id": "20251001T000000Z-00000001", "started_ns": made.FIRST_NS, "variant": "", "seed": 0}
    verdict = {"verdict": "reproduced", "expected": "reproduced", "as_expected": True, "metrics": {}}
    for number, name in enumerate(("../../../escaped", made.EVIL)):
        store.history.append(rows_of({**run, "id": f"20251001T000000Z-0000000{number}", "scenario": name}, verdict))
    with closing(site.read(tmp_path / "runs", now_ns=0)) as known:
        site.write(known, tmp_path / "site")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "site"]
    assert len(list((tmp_path / "site" / "scenarios").iterdir())) == 2
    shutil.rmtree(tmp_path / "site")
