"""The live pages in a real Chromium: a night in progress, the login, the comparison by keyboard."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from dtprobe.store import Store

pytestmark = pytest.mark.needs("chromium")
TOKEN = "not-to-be-guessed-by-anyone"


def _wait(browser: Any, text: str) -> None:
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    replaced = [NoSuchElementException, StaleElementReferenceException]
    WebDriverWait(browser, 30, poll_frequency=0.1, ignored_exceptions=replaced).until(
        lambda driver: text in driver.find_element("css selector", "main").text
    )


def test_a_night_in_progress_moves_on_without_reloading_and_ends_as_a_page(
    browser: Any, serve: Any, tmp_path: Path, made: ModuleType
) -> None:
    out = tmp_path / "runs"
    store = Store.open(out)
    run = made.run(store, made.GOOD, 0, torch="2.13.0")
    me = psutil.Process(os.getpid())
    folder = made.progress(out, me.pid, me.create_time(), [made.row(made.GOOD, run)])
    with serve(out) as (address, _):
        browser.show(f"{address}nights/{folder.name}.html")
        _wait(browser, "1 of 4 runs ended. Now: rank-stopped")
        browser.execute_script("window.same = true")
        browser.find_element("css selector", "tbody th a").send_keys("")  # focus: it must outlive the next round
        made.progress(out, me.pid, me.create_time(), [made.row(made.GOOD, run), made.row(made.HOSTILE, run)])
        _wait(browser, "2 of 4 runs ended")
        assert browser.find_element("css selector", "h1").text == "In progress: 2 of 4 runs ended"
        assert browser.execute_script("return [window.same, document.activeElement.textContent]") == [True, made.GOOD]
        browser.show(address)
        assert "In progress: 2 of 4 runs ended" in browser.find_element("css selector", "main").text
        assert browser.get_log("browser") == []


def test_the_login_lets_a_browser_in_and_the_address_stays_clean(
    browser: Any, serve: Any, runs: Path, made: ModuleType
) -> None:
    from selenium.webdriver.common.keys import Keys

    with serve(runs, "--host", "0.0.0.0", "--token", TOKEN) as (printed, _):
        browser.show(f"http://127.0.0.1:{urlsplit(printed).port}/", width=360)
        assert browser.execute_script("return document.activeElement.id") == "token"
        browser.switch_to.active_element.send_keys(TOKEN, Keys.ENTER)
        _wait(browser, made.GOOD)
        assert TOKEN not in browser.current_url and "?" not in browser.current_url
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
        assert browser.execute_script("return document.cookie") == ""


def test_two_runs_are_chosen_and_compared_by_keyboard_alone(browser: Any, server: str, made: ModuleType) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.get_log("browser")
    browser.show(f"{server}scenarios/{made.HOSTILE}.html", width=360)
    browser.execute_script("document.body.tabIndex = -1; document.body.focus()")
    for _ in range(60):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        if browser.execute_script("return document.activeElement.name") == "a":
            break
    browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN, Keys.ENTER)
    _wait(browser, "Verdict, versions and machine")
    for width, scheme in ((320, "dark"), (1200, "light")):
        browser.show(browser.current_url, width=width, scheme=scheme)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.faint_texts() == []
    assert "a=" in urlsplit(browser.current_url).query
    assert browser.get_log("browser") == []


def test_a_report_in_the_browser_leads_back_and_breaks_no_policy(
    browser: Any, server: str, runs: Path, made: ModuleType
) -> None:
    browser.get_log("browser")
    run = max(path.name for path in (runs / made.HOSTILE).iterdir())
    browser.show(f"{server}runs/{made.HOSTILE}/{run}/report.html")
    browser.find_element("link text", "All runs of made-up").click()
    _wait(browser, "Trends")
    assert browser.get_log("browser") == []
