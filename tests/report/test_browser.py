"""The page in a real Chromium: phone width, dark mode, the console, the network, the keyboard, print."""

from __future__ import annotations

import json
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

from dtprobe import report

pytestmark = pytest.mark.needs("chromium")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, samples: ModuleType) -> dict[str, str]:
    """Name of a sample -> address of its report."""
    folder = tmp_path_factory.mktemp("reports")
    return {
        name: report.write(samples.SAMPLES[name](folder / name)).as_uri()
        for name in ("leak", "skipped", "hostile", "injection", "unfinished")
    }


@pytest.mark.parametrize("width", [320, 360, 768, 1200])
@pytest.mark.parametrize("name", ["leak", "skipped", "hostile", "injection", "unfinished"])
def test_nothing_scrolls_sideways(browser: Any, pages: dict[str, str], name: str, width: int) -> None:
    browser.show(pages[name], width=width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", ["leak", "skipped", "hostile", "injection", "unfinished"])
def test_the_console_is_silent_and_nothing_is_fetched(browser: Any, pages: dict[str, str], name: str) -> None:
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.show(pages[name])
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    fetched = {message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"}
    assert fetched <= {pages[name], "data:,"}
    assert browser.execute_script("return document.scripts.length") == 0


def test_dark_mode_changes_page_text_and_figures(browser: Any, pages: dict[str, str]) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        browser.show(pages["leak"], scheme=scheme)
        seen[scheme] = browser.execute_script(
            """const of = (selector, name) => getComputedStyle(document.querySelector(selector))[name];
            return [of('body', 'backgroundColor'), of('body', 'color'), of('.panels svg text', 'fill'), of('.panels svg path[style*=control]', 'stroke')];"""
        )
    for light, dark in zip(seen["light"], seen["dark"], strict=True):
        assert light != dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["leak", "skipped", "unfinished"])
def test_every_text_has_enough_contrast(browser: Any, pages: dict[str, str], name: str, scheme: str) -> None:
    browser.show(pages[name], scheme=scheme)
    assert browser.faint_texts() == []


def test_the_keyboard_reaches_links_and_details_and_focus_shows(browser: Any, pages: dict[str, str]) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.show(pages["skipped"])
    browser.execute_script("document.body.tabIndex = -1; document.body.focus()")
    reached = []
    for _ in range(60):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        tag, text, outline, left = browser.execute_script(
            """const e = document.activeElement, style = getComputedStyle(e);
            return [e.tagName, e.textContent.trim().slice(0, 30), style.outlineStyle, e.getBoundingClientRect().left];"""
        )
        if tag == "BODY":
            break
        assert outline != "none", (tag, text)
        assert left >= 0, (tag, text)
        reached.append((tag, text))
    assert reached[0] == ("A", "Skip to the content")
    assert ("A", "Evidence") in reached
    assert ("SUMMARY", "What each arm runs") in reached


def test_headings_are_in_order_and_every_figure_has_a_name(browser: Any, pages: dict[str, str]) -> None:
    browser.show(pages["skipped"])
    levels = browser.execute_script("return [...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    unnamed = browser.execute_script(
        """return [...document.querySelectorAll('svg')].filter(svg => !svg.getAttribute('aria-labelledby').split(' ')
            .every(id => document.getElementById(id).textContent.trim())).length"""
    )
    assert unnamed == 0


def test_labels_of_a_figure_lie_within_it(browser: Any, pages: dict[str, str]) -> None:
    for name in ("leak", "skipped"):
        browser.show(pages[name])
        outside = browser.execute_script(
            """const out = [];
            for (const svg of document.querySelectorAll('svg')) {
                const box = svg.getBoundingClientRect();
                for (const text of svg.querySelectorAll('text')) {
                    const own = text.getBoundingClientRect();
                    if (own.width && (own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1 || own.bottom > box.bottom + 1))
                        out.push([svg.querySelector('title').textContent, text.textContent]);
                }
            }
            return out;"""
        )
        assert outside == []


def test_print_is_black_on_white_and_complete(browser: Any, pages: dict[str, str]) -> None:
    browser.show(pages["skipped"], scheme="dark")
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    colours = browser.execute_script(
        "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color, getComputedStyle(document.querySelector('nav')).display]"
    )
    assert colours == ["rgb(255, 255, 255)", "rgb(0, 0, 0)", "none"]
    heights = browser.execute_script(
        "return [...document.querySelectorAll('details')].map(d => d.getBoundingClientRect().height - d.querySelector('summary').getBoundingClientRect().height)"
    )
    assert heights and min(heights) > 10
