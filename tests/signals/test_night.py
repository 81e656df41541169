"""The options of `dtprobe nightly`: served while it runs, written when it ended, and never what a night fails for."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CONTENT = Path(__file__).resolve().parents[1] / "content"


def command(out, *words):
    told = ("nightly", "--path", CONTENT, "--out", out, "--only", "quick:plain", "--repeats", "1", "--jobs", "1", *words)
    return [sys.executable, "-m", "dtprobe", *map(str, told)]


def planned(text):
    """The page, once the night has begun."""
    return text if b"running_planned_runs" in text else b""


def test_a_night_is_served_while_it_runs_and_written_at_its_end_whatever_becomes_of_its_webhook(kit, tmp_path):
    out, file = tmp_path / "out", tmp_path / "dtprobe.prom"
    out.mkdir()
    (out / "webhook.json").write_text("{")
    words = ("--metrics", file, "--metrics-port", "0", "--webhook", "http://127.0.0.1:1/t0ken", "--budget", "5")
    night = subprocess.Popen(command(out, *words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        first = night.stderr.readline()
        url = re.fullmatch(r"metrics: (http://127\.0\.0\.1:(\d+)/metrics)\n", first)
        assert url, first
        text = kit.until(lambda: planned(kit.answer(url[1])), "it runs")
        assert b"dtprobe_running_planned_runs 1.0" in text and b"dtprobe_running_budget_seconds 300.0" in text
        _, said = night.communicate(timeout=120)
    finally:
        night.kill()
        night.communicate()
    assert night.returncode == 0 and "webhook: " in said and "was damaged" in said and "t0ken" not in said, said
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(url[2])), timeout=5).close()
    written = file.read_text()
    assert 'dtprobe_night_scenario_status{scenario="quick:plain",status="as-expected"} 1.0' in written
    assert "dtprobe_night_budget_seconds 300.0" in written and 'night="' + next((out / "suites").iterdir()).name in written


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--metrics", "night.txt"), "end in .prom"),
        (("--metrics-port", "70000"), "--metrics-port 70000: no port"),
        (("--webhook", "example.org"), "--webhook: not an address"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_runs(tmp_path, words, says):
    done = subprocess.run(command(tmp_path / "out", *words), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
