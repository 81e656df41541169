"""The page and the terminal's table, made of a report with everything in it; the page in a real Chromium."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dtprobe.doctor.cluster import matrix, measured, page, terminal
from dtprobe.doctor.cluster.clocks import Offset
from dtprobe.doctor.cluster.facts import Facts, Limit, Memory, Space
from dtprobe.doctor.cluster.matrix import Link
from dtprobe.doctor.cluster.network import Interface, Network
from dtprobe.doctor.cluster.verdict import ClusterReport, Collective, Problem
from dtprobe.errors import UsageError

HOSTILE = "<script>alert(1)</script>\x1b[31m & [bold]"


def report(size: int = 4) -> ClusterReport:
    """Two hosts, one slow, with a hostile variable."""
    eth = Interface(name="eth0", up=True, loopback=False, mtu=1500, speed_mbit=1000, addresses=("10.0.0.1/24",))
    net = Network(
        interfaces=(eth,),
        host_addresses=("10.0.0.1",),
        gloo_interface="eth0",
        gloo_because="",
        nccl_interface="eth0",
        nccl_because="",
        gloo_address="10.0.0.1",
    )
    facts = [
        Facts(
            rank=rank,
            local_rank=rank % 2,
            host=f"a-rather-long-name-of-a-host-{rank // 2}",
            pid=rank,
            user="someone",
            cores=2,
            load=0.1,
            versions={"torch": "2.13.0+cpu", "nccl": None, "python": f"3.11.{rank}"},
            environment={"NCCL_ALGO": HOSTILE} if rank == 1 else {},
            limits={name: Limit(soft=None if name == "nproc" else 1024, hard=None) for name in ("nofile", "nproc", "memlock")},
            shm=Space(total=1 << 30, free=1 << 20),
            memory=Memory(total=1 << 34, available=1 << 33, cgroup_limit=None, cgroup_used=None),
            network=net,
            rdma=(),
            gpu=None,
            gpu_problem="",
        )
        for rank in range(size)
    ]
    links = matrix.judged(
        Link(
            transport="gloo",
            a=a,
            b=b,
            kind="between hosts",
            latency_s=1e-4,
            out_bytes_s=1e9 / (20 if b == size - 1 else 1),
            back_bytes_s=1e9,
            size=1 << 20,
            repeats=3,
            offset_s=0.0,
            uncertainty_s=1e-4,
        )
        for a, b in combinations(range(size), 2)
    )
    hosts: dict[str, list[int]] = {}
    for each in facts:
        hosts.setdefault(each.host, []).append(each.rank)
    hostile = Problem(check="environment", severity="error", ranks=(1,), hosts=(), found=HOSTILE, wanted="", remedy="unset it")
    note = Problem(check="interface", severity="note", ranks=(), hosts=(), found="several", wanted="", remedy="name one")
    return ClusterReport(
        launcher="mpirun",
        world_size=size,
        hosts=hosts,
        ranks=facts,
        problems=[note, hostile, *measured.of_links(links, facts)],
        collectives=[Collective(transport="gloo", op="all_reduce sum", dtype="float32", elements=9, wrong=(), blamed=())],
        links=links,
        not_measured="3 of 9 links",
        offsets=[Offset(rank=rank, of=0, offset_s=1e-5 * rank, uncertainty_s=1e-4) for rank in range(size)],
        took_s=3.0,
        deadline_s=60.0,
        started_ns=1_700_000_000 * 10**9,
        dtprobe="0.1.0",
    )


def shown(found: ClusterReport) -> list[str]:
    out = io.StringIO()
    terminal.render(found, Console(file=out, width=80))
    return out.getvalue().splitlines()


def test_on_a_terminal_each_problem_is_one_line_worst_first_and_text_is_no_markup() -> None:
    lines = shown(report())
    assert "2 problems" in lines[0] and "4 ranks on 2 hosts, started by mpirun" in lines[0]
    assert [line.split(":")[0] for line in lines[1:4]] == ["error", "warning", "note"]
    assert "[bold]" in lines[1] and "\x1b" not in lines[1] and lines[1].endswith("unset it")
    assert any("3 slow links have rank 3 in common" in line for line in lines)
    assert any(line.split() == ["0", "954", "954", "47.7"] for line in lines)
    assert any("not measured: 3 of 9 links" in line for line in lines)
    assert any("collectives  1 of 1 right" in line for line in lines)


def test_a_matrix_too_wide_for_a_terminal_is_summed_up() -> None:
    lines = shown(report(20))
    assert any("median" in line and "cluster.html" in line for line in lines) and len(lines) < 20


def test_the_page_escapes_what_ranks_said_and_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    text = page.write(report(), tmp_path / "new").read_text()
    assert "<script>" not in text and "&lt;script&gt;" in text and "2 problems" in text
    assert json.loads((tmp_path / "new" / "cluster.json").read_text())["schema"] == "dtprobe.cluster/1"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--out"):
        page.write(report(), tmp_path / "file")


def test_a_report_with_nothing_measured_has_a_page(tmp_path: Path) -> None:
    bare = replace(report(), links=[], offsets=[], collectives=[], ranks=[], problems=[], hosts={})
    assert "Healthy" in page.write(bare, tmp_path).read_text()


@pytest.mark.nightly
@pytest.mark.needs("chromium")
def test_in_a_browser_nothing_scrolls_sideways_or_is_fetched_and_text_can_be_read(tmp_path: Path) -> None:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    address = page.write(report(20), tmp_path / "page").as_uri()
    options = Options()
    options.binary_location = next(path for name in ("chromium", "google-chrome") if (path := shutil.which(name)))
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        seen: dict[str, Any] = {}
        for width in (320, 360, 768, 1200):
            for scheme in ("light", "dark"):
                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
                driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                driver.execute_cdp_cmd(
                    "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
                )
                driver.get(address)
                assert driver.execute_script("return document.documentElement.scrollWidth") <= width
                seen[scheme] = driver.execute_script(
                    "const s = q => getComputedStyle(document.querySelector(q));"
                    "return [s('body').backgroundColor, s('td.heat-5').backgroundColor, s('td.heat-5').color]"
                )
                assert driver.execute_script(_CONTRAST) >= 4.5
        assert all(light != dark for light, dark in zip(seen["light"], seen["dark"], strict=True))
        assert driver.get_log("browser") == []
        messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        fetched = {each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"}
        assert {url for url in fetched if not url.startswith(("chrome://", "data:"))} == {
            address
        }  # a new tab of its own comes late
    finally:
        driver.quit()


_CONTRAST = """
const parse = text => { const c = document.createElement('canvas').getContext('2d'); c.fillStyle = text; c.fillRect(0, 0, 1, 1);
    return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3); };
const light = rgb => { const [r, g, b] = rgb.map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
return Math.min(...[1, 2, 3, 4, 5].map(n => document.querySelector('.heat-' + n)).filter(Boolean).map(cell => {
    const style = getComputedStyle(cell), [a, b] = [light(parse(style.color)), light(parse(style.backgroundColor))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05); }));
"""
