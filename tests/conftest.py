"""Markers of this suite, and the guard that no test leaves a process behind."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

from dtprobe import doctor

_GRACE_S = 0.5

# Each connection to a TCPStore asks a DNS server for the name of its peer, and waits 5 s for an answer that is lost (torch 2.13).
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# How long an example takes is the machine's affair, not the property's.
settings.register_profile("dtprobe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dtprobe")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the long tests too")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """`alone`: one at a time over all workers and all runs of this checkout, by a lock on the folder of tests.

    Not by xdist's groups: they change node ids, which pytest 9.2 ignores (seen with xdist 3.8). Outermost, so that the wait
    does not count against the test's timeout.
    """
    if not item.get_closest_marker("alone"):
        return (yield)
    lock = os.open(Path(__file__).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)
    finally:
        os.close(lock)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("nightly") or "nightly" in config.getoption("markexpr"):
        return
    long = [item for item in items if item.get_closest_marker("nightly")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`needs`: skip with doctor's reason; in CI what a package would cure is a failure, or nobody would ever see it missing."""
    names = [name for marker in item.iter_markers("needs") for name in marker.args]
    unavailable = doctor.together(doctor.here().unmet(names))
    if unavailable is None:
        return
    if isinstance(unavailable, doctor.Missing) and os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(f"in CI this must run: {unavailable}", pytrace=False)
    pytest.skip(str(unavailable))


def _children() -> dict[int, psutil.Process]:
    """Children of this process by pid, without multiprocessing's own tracker, which lives as long as the interpreter."""
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    found = {child.pid: child for child in psutil.Process().children()}
    found.pop(getattr(tracker, "_pid", None), None)
    return found


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Fails a test that leaves a child process running; what module and session fixtures started before it is theirs."""
    before = _children()
    yield
    left = {pid: child for pid, child in _children().items() if pid not in before}
    if not left:
        return
    _, running = psutil.wait_procs(list(left.values()), timeout=_GRACE_S)
    told = []
    for child in running:
        with child.oneshot():
            told.append(f"{child.pid} {child.status()} {' '.join(child.cmdline()) or child.name()}")
        child.kill()
    psutil.wait_procs(running, timeout=_GRACE_S)
    assert not told, f"left behind: {'; '.join(told)}"


CHROMIUM_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
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
            if (!own || !node.getClientRects().length || node.matches('title, desc') || (!arguments[0] && node.closest('svg'))) continue;
            const style = getComputedStyle(node);
            const ink = parse(node.closest('svg') ? style.fill : style.color), paper = behind(node);
            const [a, b] = [light(ink), light(paper)].sort((x, y) => y - x);
            const ratio = (a + 0.05) / (b + 0.05);
            if (ratio < 4.5) bad.push([node.tagName, node.textContent.trim().slice(0, 40), ratio]);
        }
        return bad;
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Chromium without a screen, with a fresh profile: selenium's driver that can also `show` an address on a screen of its own and
    name `faint_texts`, whose contrast is below 4.5 (tag, text, ratio). Its tests need `chromium`."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    class Browser(webdriver.Chrome):
        def show(self, address: str, *, width: int = 1200, scheme: str = "light", media: str = "screen") -> None:
            screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            self.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
            self.get(address)

        def faint_texts(self, *, in_pictures: bool = True) -> list[list[Any]]:
            return self.execute_script(FAINT, in_pictures)

    options = Options()
    options.binary_location = next(
        path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))
    )
    for flag in (*CHROMIUM_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Browser(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()
