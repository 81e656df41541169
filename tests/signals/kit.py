"""A night's summary for the tests of signals, and the real Prometheus that reads what is made of it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack, contextmanager

WAIT_S = 60.0


def row(scenario, status="as-expected", verdict="reproduced", **more):
    told = {
        "expected": "reproduced",
        "mitigation": "held",
        "because": "",
        "took_s": 2.5,
        "folder": "",
        "title": "",
        "claim": "",
    }
    return {"scenario": scenario, "status": status, "verdict": verdict, "metrics": {}, **told, **more}


def regression(scenario="gloo-thread-leak", **more):
    return {
        "scenario": scenario,
        "metric": "threads",
        "arm": "fault",
        "kind": "metric",
        "before": 4.0,
        "after": 9.0,
        "first_bad_run": f"{scenario}/20261130T020000Z-1",
        "last_good_run": f"{scenario}/20261129T020000Z-1",
        "first_bad_ns": 1_796_000_000_000_000_000,
        "commit_range": "a..b",
        "confidence": 0.97,
        "because": "a step of 5 threads",
        "bisect": "git bisect start b a",
        **more,
    }


def summary(*rows, regressions=(), well=True, **more):
    return {
        "schema": "dtprobe.suite/1",
        "began_ns": 1_796_000_000_000_000_000,
        "took_s": 600.0,
        "interrupted": False,
        "well": well,
        "versions": {"torch": "2.13.0+cpu", "dtprobe": "0.1.0"},
        "machine": {"host": "node-a", "python": "3.11.7"},
        "scenarios": list(rows) or [row("gloo-thread-leak")],
        "regressions": list(regressions),
        **more,
    }


def until(holds, what):
    """What `holds` gives as soon as it is true, within a bound that says what did not come."""
    deadline = time.monotonic() + WAIT_S
    while not (found := holds()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def free_ports(count):
    with ExitStack() as held:
        probes = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def answer(url):
    with urllib.request.urlopen(url, timeout=10) as said:
        return said.read()


@contextmanager
def process(folder, *command):
    """A service for the length of a block; ended by its own pid."""
    with (folder / f"{command[0]}.log").open("wb") as log:
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield running
        finally:
            running.terminate()
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


class Prometheus:
    """Its HTTP API."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def ready(self):
        try:
            return bool(answer(f"{self.url}/-/ready"))
        except OSError:
            return False

    def query(self, expression):
        """The series that an expression gives now: labels without the job's own, and values."""
        said = json.loads(answer(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"))
        assert said["status"] == "success", said
        return [
            ({k: v for k, v in one["metric"].items() if k not in ("__name__", "instance", "job")}, float(one["value"][1]))
            for one in said["data"]["result"]
        ]

    def value(self, expression):
        """Of an expression that gives one series, None where it gives none."""
        found = self.query(expression)
        assert len(found) < 2, found
        return found[0][1] if found else None


@contextmanager
def prometheus(folder, jobs):
    """A real Prometheus for the length of a block, which scrapes the given ports of loopback (by job) five times a second."""
    (port,) = free_ports(1)
    targets = "".join(
        f"  - job_name: {job}\n    static_configs: [{{targets: ['127.0.0.1:{at}']}}]\n" for job, at in jobs.items()
    )
    config = folder / "prometheus.yml"
    config.write_text(f"global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}\nscrape_configs:\n{targets}")
    command = (
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )
    with process(folder, *command):
        found = Prometheus(port)
        until(found.ready, "Prometheus did not become ready")
        yield found
