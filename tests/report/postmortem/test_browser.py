"""The incident note in a real Chromium: phone and desktop, dark and light, the console, the network, print."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dtprobe.report.postmortem import note, page

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.xdist_group("browser")]

OUTSIDE = """
const out = [];
for (const svg of document.querySelectorAll('svg')) {
    const frame = svg.getBoundingClientRect();
    for (const text of svg.querySelectorAll('text')) {
        const own = text.getBoundingClientRect();
        if (own.width && (own.left < frame.left - 1 || own.right > frame.right + 1 || own.top < frame.top - 1 || own.bottom > frame.bottom + 1))
            out.push([svg.querySelector('title').textContent, text.textContent]);
    }
}
return out;"""

FAINT = """
const parse = text => { const c = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    c.fillStyle = text; c.fillRect(0, 0, 1, 1); return [...c.getImageData(0, 0, 1, 1).data]; };
const light = rgb => { const [r, g, b] = rgb.slice(0, 3).map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = node => { for (let n = node; n; n = n.parentElement) { const rgb = parse(getComputedStyle(n).backgroundColor); if (rgb[3] === 255) return rgb; }
    return [255, 255, 255, 255]; };
const bad = [];
for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.getClientRects().length || node.closest('svg')) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) bad.push([node.tagName, node.textContent.trim().slice(0, 40)]);
}
return bad;"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, diagnoses: ModuleType) -> dict[str, str]:
    """Name of a diagnosis -> address of its page."""
    folder: Path = tmp_path_factory.mktemp("pages")
    for name, made in diagnoses.ALL.items():
        (folder / f"{name}.html").write_text(
            page.html(note.of(made()), subject=["logs/"], made_ns=diagnoses.T0), encoding="utf-8"
        )
    return {name: (folder / f"{name}.html").as_uri() for name in diagnoses.ALL}


def _show(browser: Any, address: str, *, width: int = 1200, scheme: str = "light", media: str = "screen") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    browser.get(address)


def test_on_a_phone_and_a_desk_nothing_scrolls_sideways_and_labels_lie_within_their_pictures(
    browser: Any, pages: dict[str, str]
) -> None:
    for address in pages.values():
        for width in (320, 1200):
            _show(browser, address, width=width)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width, (address, width)
            assert browser.execute_script(OUTSIDE) == [], (address, width)


def test_the_console_is_silent_nothing_is_fetched_and_nothing_of_an_enemy_runs(browser: Any, pages: dict[str, str]) -> None:
    for name in ("lost_gpu", "hostile"):
        for kind in ("browser", "performance"):
            browser.get_log(kind)
        _show(browser, pages[name])
        assert browser.get_log("browser") == []
        messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        fetched = {one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"}
        assert fetched <= {pages[name], "data:,"}
        assert browser.execute_script("return document.scripts.length") == 0


def test_every_text_has_enough_contrast_and_pictures_follow_the_scheme(browser: Any, pages: dict[str, str]) -> None:
    colours = []
    for scheme in ("light", "dark"):
        for name in ("lost_gpu", "undetermined"):
            _show(browser, pages[name], scheme=scheme)
            assert browser.execute_script(FAINT) == [], (name, scheme)
        _show(browser, pages["lost_gpu"], scheme=scheme)
        colours.append(
            browser.execute_script(
                "const s = q => getComputedStyle(document.querySelector(q)); return [s('body').backgroundColor, s('svg text').fill, s('svg rect').fill]"
            )
        )
    assert all(light != dark for light, dark in zip(*colours, strict=True))


def test_on_paper_it_is_black_on_white_and_complete(browser: Any, pages: dict[str, str]) -> None:
    _show(browser, pages["lost_gpu"], scheme="dark", media="print")
    assert browser.execute_script("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]") == [
        "rgb(255, 255, 255)",
        "rgb(0, 0, 0)",
    ]
    shown = browser.execute_script(
        "return [...document.querySelectorAll('section')].filter(one => one.getBoundingClientRect().height < 20).length"
    )
    assert shown == 0


def test_every_picture_has_a_name_and_a_description(browser: Any, pages: dict[str, str]) -> None:
    _show(browser, pages["lost_gpu"])
    told = browser.execute_script(
        "return [...document.querySelectorAll('svg')].map(svg => svg.getAttribute('aria-labelledby').split(' ').map(id => document.getElementById(id).textContent.trim()))"
    )
    assert len(told) == 3 and all(all(texts) for texts in told)
    assert "ranks 0-2 wait in all_reduce #812 of default_pg for rank 3" in told[-1][1]
