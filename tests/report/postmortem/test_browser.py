"""The incident note in a real Chromium: phone and desktop, dark and light, the console, the network, print."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dtprobe.report.postmortem import note, page

pytestmark = pytest.mark.needs("chromium")

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


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, diagnoses: ModuleType) -> dict[str, str]:
    """Name of a diagnosis -> address of its page."""
    folder: Path = tmp_path_factory.mktemp("pages")
    for name, made in diagnoses.ALL.items():
        (folder / f"{name}.html").write_text(
            page.html(note.of(made()), subject=["logs/"], made_ns=diagnoses.T0), encoding="utf-8"
        )
    return {name: (folder / f"{name}.html").as_uri() for name in diagnoses.ALL}


def test_on_a_phone_and_a_desk_nothing_scrolls_sideways_and_labels_lie_within_their_pictures(
    browser: Any, pages: dict[str, str]
) -> None:
    for address in pages.values():
        for width in (320, 1200):
            browser.show(address, width=width)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width, (address, width)
            assert browser.execute_script(OUTSIDE) == [], (address, width)


def test_the_console_is_silent_nothing_is_fetched_and_nothing_of_an_enemy_runs(browser: Any, pages: dict[str, str]) -> None:
    for name in ("lost_gpu", "hostile"):
        for kind in ("browser", "performance"):
            browser.get_log(kind)
        browser.show(pages[name])
        assert browser.get_log("browser") == []
        messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        fetched = {one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"}
        assert fetched <= {pages[name], "data:,"}
        assert browser.execute_script("return document.scripts.length") == 0


def test_every_text_has_enough_contrast_and_pictures_follow_the_scheme(browser: Any, pages: dict[str, str]) -> None:
    colours = []
    for scheme in ("light", "dark"):
        for name in ("lost_gpu", "undetermined"):
            browser.show(pages[name], scheme=scheme)
            assert browser.faint_texts(in_pictures=False) == [], (name, scheme)
        browser.show(pages["lost_gpu"], scheme=scheme)
        colours.append(
            browser.execute_script(
                "const s = q => getComputedStyle(document.querySelector(q)); return [s('body').backgroundColor, s('svg text').fill, s('svg rect').fill]"
            )
        )
    assert all(light != dark for light, dark in zip(*colours, strict=True))


def test_on_paper_it_is_black_on_white_and_complete(browser: Any, pages: dict[str, str]) -> None:
    browser.show(pages["lost_gpu"], scheme="dark", media="print")
    assert browser.execute_script("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]") == [
        "rgb(255, 255, 255)",
        "rgb(0, 0, 0)",
    ]
    shown = browser.execute_script(
        "return [...document.querySelectorAll('section')].filter(one => one.getBoundingClientRect().height < 20).length"
    )
    assert shown == 0


def test_every_picture_has_a_name_and_a_description(browser: Any, pages: dict[str, str]) -> None:
    browser.show(pages["lost_gpu"])
    told = browser.execute_script(
        "return [...document.querySelectorAll('svg')].map(svg => svg.getAttribute('aria-labelledby').split(' ').map(id => document.getElementById(id).textContent.trim()))"
    )
    assert len(told) == 3 and all(all(texts) for texts in told)
    assert "ranks 0-2 wait in all_reduce #812 of default_pg for rank 3" in told[-1][1]
