"""The static site in a real Chromium, from disk."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from dtprobe import site

pytestmark = pytest.mark.needs("chromium")


@pytest.fixture(scope="module")
def address(known: site.Known, tmp_path_factory: pytest.TempPathFactory) -> str:
    to = tmp_path_factory.mktemp("built") / "site"
    site.write(known, to)
    return to.as_uri()


@pytest.fixture(scope="module")
def pages(address: str, made: ModuleType) -> list[str]:
    names = ["index.html", "nights.html", "regressions.html", "claims.html", "confusion.html"]
    names += [f"scenarios/{made.GOOD}.html", f"scenarios/{made.HOSTILE}.html", f"nights/{made.night_id(5)}.html"]
    return [f"{address}/{name}" for name in names]


def test_no_page_scrolls_sideways_on_a_phone_or_a_desk(browser: Any, pages: list[str]) -> None:
    for page in pages:
        for width in (320, 768):
            browser.show(page, width=width)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width, (page, width)


def test_the_console_is_silent_and_nothing_is_fetched(browser: Any, pages: list[str]) -> None:
    for page in pages:
        for kind in ("browser", "performance"):
            browser.get_log(kind)
        browser.show(page)
        assert browser.get_log("browser") == [], page
        messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        asked = {one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"}
        assert asked <= {page, "data:,"}
        assert "broken in" not in browser.title


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(browser: Any, pages: list[str], scheme: str) -> None:
    for page in pages:
        browser.show(page, scheme=scheme)
        assert browser.faint_texts() == [], page


def test_landmarks_headings_and_headers_of_tables_are_there(browser: Any, pages: list[str]) -> None:
    for page in pages:
        browser.show(page)
        found = browser.execute_script(
            """const all = selector => [...document.querySelectorAll(selector)];
            return {marks: ['header', 'nav', 'main', 'footer'].filter(one => all(one).length !== 1), h1: all('h1').length,
                bare: all('tbody tr').filter(row => !row.querySelector('th[scope=row]')).length,
                heads: all('table').filter(table => !table.querySelector('th[scope=col]')).length,
                unnamed: all('section').filter(one => !one.ariaLabel && !document.getElementById(one.getAttribute('aria-labelledby'))).length,
                current: all('nav [aria-current=page]').length, doubled: all('[id]').length - new Set(all('[id]').map(e => e.id)).size};"""
        )
        assert found == {"marks": [], "h1": 1, "bare": 0, "heads": 0, "unnamed": 0, "current": 1, "doubled": 0}, page


def test_the_keyboard_alone_reaches_everything_and_focus_shows(browser: Any, pages: list[str]) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.show(pages[0], width=360)
    browser.execute_script("document.body.tabIndex = -1; document.body.focus()")
    reached = []
    for _ in range(80):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        tag, text, outline = browser.execute_script(
            "const e = document.activeElement; return [e.tagName, e.textContent.trim(), getComputedStyle(e).outlineStyle]"
        )
        if tag == "BODY":
            break
        assert outline != "none", (tag, text)
        reached.append((tag, text))
    assert reached[0] == ("A", "Skip to the content")
    assert {("A", "Nights"), ("A", "rank-stopped"), ("BUTTON", "Clear")} <= set(reached)
    assert {"INPUT", "SELECT", "SUMMARY"} <= {tag for tag, _ in reached}


def _shown(browser: Any) -> list[str]:
    return browser.execute_script(
        "return [...document.querySelectorAll('#rows tr')].filter(row => row.offsetParent || row.getClientRects().length).map(row => row.querySelector('a').textContent)"
    )


def test_filters_work_from_disk_by_keyboard_and_stand_in_the_address(browser: Any, pages: list[str], made: ModuleType) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.show(pages[0], width=360)
    assert set(_shown(browser)) == {made.GOOD, made.HOSTILE}
    browser.switch_to.active_element.send_keys("/")
    assert browser.execute_script("return document.activeElement.name") == "q"
    browser.switch_to.active_element.send_keys("STOPPED rank")
    assert _shown(browser) == [made.GOOD]
    assert browser.find_element("css selector", ".filters output").text == "1 of 2 scenarios"
    address = browser.current_url
    assert "q=STOPPED" in address
    browser.show(address)
    assert _shown(browser) == [made.GOOD]
    browser.find_element("css selector", ".filters button").send_keys(Keys.ENTER)
    assert len(_shown(browser)) == 2
    browser.show(f"{pages[0]}?status=as-expected&layer=process")
    assert _shown(browser) == [made.HOSTILE]
    browser.show(f"{pages[0]}?status=<script>alert(1)</script>&tag=none")
    assert browser.get_log("browser") == []


def test_a_figure_keeps_its_labels_within_it(browser: Any, pages: list[str], made: ModuleType) -> None:
    browser.show(next(page for page in pages if page.endswith(f"{made.GOOD}.html")))
    outside = browser.execute_script(
        """const out = [];
        for (const svg of document.querySelectorAll('svg.trend')) {
            const box = svg.getBoundingClientRect();
            for (const text of svg.querySelectorAll('text')) {
                const own = text.getBoundingClientRect();
                if (own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1 || own.bottom > box.bottom + 1) out.push(text.textContent);
            }
        }
        return [document.querySelectorAll('svg.trend').length, out];"""
    )
    assert outside == [1, []]
