"""The page in a real Chromium: phone width, dark mode, the console, the network, the keyboard, print."""

from __future__ import annotations

import json
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

from dtprobe import report

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, samples: ModuleType) -> dict[str, str]:
    """Name of a sample -> address of its report."""
    folder = tmp_path_factory.mktemp("reports")
    return {
        name: report.write(samples.SAMPLES[name](folder / name)).as_uri()
        for name in ("leak", "skipped", "hostile", "injection", "unfinished")
    }


def _show(browser: Any, address: str, *, width: int = 1200, scheme: str = "light") -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    browser.get(address)


@pytest.mark.parametrize("width", [320, 360, 768, 1200])
@pytest.mark.parametrize("name", ["leak", "skipped", "hostile", "injection", "unfinished"])
def test_nothing_scrolls_sideways(browser: Any, pages: dict[str, str], name: str, width: int) -> None:
    _show(browser, pages[name], width=width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", ["leak", "skipped", "hostile", "injection", "unfinished"])
def test_the_console_is_silent_and_nothing_is_fetched(browser: Any, pages: dict[str, str], name: str) -> None:
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    _show(browser, pages[name])
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    fetched = {message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"}
    assert fetched <= {pages[name], "data:,"}
    assert browser.execute_script("return document.scripts.length") == 0


def test_dark_mode_changes_page_text_and_figures(browser: Any, pages: dict[str, str]) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        _show(browser, pages["leak"], scheme=scheme)
        seen[scheme] = browser.execute_script(
            """const of = (selector, name) => getComputedStyle(document.querySelector(selector))[name];
            return [of('body', 'backgroundColor'), of('body', 'color'), of('.panels svg text', 'fill'), of('.panels svg path[style*=control]', 'stroke')];"""
        )
    for light, dark in zip(seen["light"], seen["dark"], strict=True):
        assert light != dark


def _contrast(browser: Any) -> list[list[Any]]:
    return browser.execute_script(
        """
        const parse = text => { const c = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
            c.fillStyle = text; c.fillRect(0, 0, 1, 1); return [...c.getImageData(0, 0, 1, 1).data]; };
        const light = rgb => { const [r, g, b] = rgb.slice(0, 3).map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const behind = node => { for (let n = node; n; n = n.parentElement) { const rgb = parse(getComputedStyle(n).backgroundColor); if (rgb[3] === 255) return rgb; }
            return [255, 255, 255, 255]; };
        const bad = [];
        for (const node of document.querySelectorAll('body *')) {
            const own = [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
            if (!own || !node.getClientRects().length || node.matches('title, desc')) continue;
            const style = getComputedStyle(node);
            const ink = parse(node.closest('svg') ? style.fill : style.color), paper = behind(node);
            const [a, b] = [light(ink), light(paper)].sort((x, y) => y - x);
            const ratio = (a + 0.05) / (b + 0.05);
            if (ratio < 4.5) bad.push([node.tagName, node.textContent.trim().slice(0, 40), ratio]);
        }
        return bad;"""
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["leak", "skipped", "unfinished"])
def test_every_text_has_enough_contrast(browser: Any, pages: dict[str, str], name: str, scheme: str) -> None:
    _show(browser, pages[name], scheme=scheme)
    assert _contrast(browser) == []


def test_the_keyboard_reaches_links_and_details_and_focus_shows(browser: Any, pages: dict[str, str]) -> None:
    from selenium.webdriver.common.keys import Keys

    _show(browser, pages["skipped"])
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
    _show(browser, pages["skipped"])
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
        _show(browser, pages[name])
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
    _show(browser, pages["skipped"], scheme="dark")
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
