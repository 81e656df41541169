"""Take the README's picture of a report: `python docs/picture.py RUN_FOLDER docs/report.png` (needs Chromium and its driver)."""

from __future__ import annotations

import argparse
import base64
import shutil
import tempfile
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run folder with its report.html")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    parser.add_argument("--width", type=int, default=1080, help="of the page, in CSS pixels (default %(default)s)")
    parser.add_argument("--height", type=int, default=1500, help="how much of the page is shown (default %(default)s)")
    parser.add_argument("--dark", action="store_true", help="the dark colours")
    chosen = parser.parse_args()
    options = Options()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            scheme = {"name": "prefers-color-scheme", "value": "dark" if chosen.dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            size = {"width": chosen.width, "height": chosen.height}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size | {"deviceScaleFactor": 1, "mobile": False})
            driver.get((chosen.run / "report.html").resolve().as_uri())
            taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        finally:
            driver.quit()
    chosen.picture.write_bytes(base64.b64decode(taken["data"]))


if __name__ == "__main__":
    main()
